// One episode, or two side by side: every stream on one transport.
import { ask, bufferPath, bytes, clock, h, number, table } from "./dom.js";
import { lines } from "./charts.js";

const AHEAD = 12;

export function showEpisode(main, app, at) {
  const [buffer, one] = at.path;
  const numbers = [one, at.query.get("with")].filter(Boolean);
  const sides = [];
  let step = Number(at.query.get("step") ?? 0), last = 0, timer = null, hasEnded = false;

  const slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step", oninput: () => go(Number(slider.value)) });
  const shown = h("output", {}, "0");
  const play = h("button", { type: "button", onclick: () => toggle() }, "Play");
  const rate = h("select", { "aria-label": "Steps per second" }, [5, 15, 30, 60].map((each) => h("option", { value: each, selected: each === 15 }, `${each}/s`)));
  const holder = h("div", { class: numbers.length > 1 ? "sides two" : "sides" });
  main.append(
    h("p", {}, h("a", { href: `#/episodes/${encodeURIComponent(buffer)}` }, `Episodes of ${buffer}`)),
    h("div", { class: "transport", role: "group", "aria-label": "Transport" }, play,
      h("button", { type: "button", "aria-label": "Step back", onclick: () => go(step - 1) }, "◀"), slider,
      h("button", { type: "button", "aria-label": "Step on", onclick: () => go(step + 1) }, "▶"), shown, rate),
    h("p", { class: "hint" }, "Keys: ← and → a step, with Shift ten; Home and End; Space plays."), holder);

  function go(next) {
    step = Math.max(0, Math.min(last, next));
    slider.value = step;
    shown.textContent = `step ${step} of ${last}`;
    for (const side of sides) side.show(step);
    const query = new URLSearchParams(at.query);
    query.set("step", step);
    history.replaceState(null, "", `#/episode/${encodeURIComponent(buffer)}/${one}?${query}`);
  }
  function toggle() {
    if (timer) { clearInterval(timer); timer = null; play.textContent = "Play"; return; }
    if (step >= last) go(0);
    play.textContent = "Pause";
    timer = setInterval(() => {
      if (sides.some((side) => side.isLoading())) return;
      if (step >= last) toggle(); else go(step + 1);
    }, 1000 / Number(rate.value));
  }
  rate.addEventListener("change", () => { if (timer) { toggle(); toggle(); } });
  function key(event) {
    if (event.target.closest("input:not([type=range]), select, textarea") || event.altKey || event.ctrlKey || event.metaKey) return;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) go(step + move * (event.shiftKey ? 10 : 1));
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(last);
    else if (event.key === " " && !event.target.closest("button, a")) toggle();
    else return;
    event.preventDefault();
  }
  document.addEventListener("keydown", key);

  Promise.all(numbers.map((each) => ask(`${bufferPath(buffer)}/episodes/${each}`))).then((found) => {
    if (hasEnded) return;
    last = Math.max(0, ...found.map((each) => each.length - 1));
    slider.max = last;
    for (const each of found) { const side = makeSide(buffer, each, go); sides.push(side); holder.append(side.element); }
    go(step);
  }, (error) => { if (!hasEnded) holder.append(h("p", { class: "bad", role: "alert" }, error.message)); });
  return { end() { hasEnded = true; clearInterval(timer); document.removeEventListener("keydown", key); for (const each of sides) each.end(); } };
}

function makeSide(buffer, episode, go) {
  const path = `${bufferPath(buffer)}/episodes/${episode.number}`;
  const url = (stream, step) => `${path}/frame/${step}?stream=${encodeURIComponent(stream)}`;
  const images = episode.streams.filter((each) => each.kind === "image").map((each) => {
    const image = h("img", { alt: `${each.path}` });
    return { ...each, image, figure: h("figure", {}, h("figcaption", {}, `${each.path} ${each.type}`), image) };
  });
  const pictures = episode.streams.filter((each) => each.kind === "picture").map((each) => h("figure", { class: "wide" },
    h("figcaption", {}, `${each.path} ${each.type}: a column for each step`),
    h("img", { alt: `${each.path} over all steps`, loading: "lazy", src: `${path}/picture?stream=${encodeURIComponent(each.path)}` })));
  const charts = [];
  const chart = (title, series) => {
    if (!series.length || !series[0].values.length) return;
    const xs = series[0].values.map((_, at) => at * series[0].stride);
    charts.push(lines(title, series.map((_, at) => (series.length > 1 ? `[${at}]` : title)), [xs, ...series.map((each) => each.values)], { isTime: false, onPick: go }));
  };
  const order = ["reward", "value", "log_prob", "model_version", "action"];
  const series = { reward: [episode.rewards], ...episode.series };
  for (const name of [...order, ...Object.keys(series).filter((each) => !order.includes(each))]) {
    const constant = ["first", "episode_id", "extras.episode_return", "extras.episode_length"].includes(name);
    const isFlag = ["terminated", "truncated"].includes(name);
    if (series[name] && !constant && !(isFlag && !series[name][0].values.some(Boolean))) chart(name, series[name]);
  }
  const texts = Object.keys(episode.texts).map((name) => ({ name, at: h("p", { class: "text" }) }));
  const tokens = h("div", {});
  const canBeTokens = episode.streams.some((each) => each.path === "action" && /^.?[iu]\d\[\]$/.test(each.type.replace(/[<>|=]/, "")));
  const marker = h("span", { class: "cursor" });
  const lane = h("div", { class: "lanes" }, episode.lanes.map((each) => h("button", {
    type: "button", class: each.is_held ? "lane" : "lane gone", style: { flexGrow: String(each.steps) },
    title: laneText(each), "aria-label": laneText(each), onclick: () => go(each.step),
  }, `v${each.version_min}${each.version_max === each.version_min ? "" : `–${each.version_max}`}`)), marker);
  const element = h("section", { class: "side", "aria-label": `Episode ${episode.number}` },
    h("h2", {}, `${episode.worker} #${episode.episode}`),
    h("p", {}, `Task ${episode.task}; return ${number(episode.return)}; ${number(episode.length)} steps; ${episode.end}; versions ${episode.version_min} to ${episode.version_max}`),
    h("p", { class: "bar-row" }, h("a", { href: `${path}/file.parquet`, download: "" }, "Parquet"),
      images.some((each) => each.type !== "renderer") ? h("a", { href: `${path}/file.mp4`, download: "" }, "MP4") : "",
      canBeTokens ? h("button", { type: "button", onclick: () => showTokens(path, tokens, go) }, "Show actions as tokens") : ""),
    episode.gone ? h("p", { class: "problem warn", role: "status" }, episode.gone) : "",
    h("div", { class: "images" }, images.map((each) => each.figure)), texts.map((each) => h("div", {}, h("h3", {}, each.name), each.at)), tokens,
    h("h3", {}, "Fragments, by the versions that acted"), lane, lives(episode, go), lanesTable(episode),
    h("div", { class: "charts" }, charts.map((each) => each.element)), h("div", { class: "images" }, pictures));
  const ahead = new Map();
  return {
    element,
    isLoading: () => images.some((each) => !each.image.complete),
    show(step) {
      const own = Math.min(step, episode.length - 1);
      for (const each of images) {
        each.image.src = url(each.path, own);
        for (let next = own + 1; next <= Math.min(own + AHEAD, episode.length - 1); next += 1) {
          const key = url(each.path, next);
          if (!ahead.has(key)) { const made = new Image(); made.src = key; ahead.set(key, made); }
        }
      }
      while (ahead.size > 8 * AHEAD) ahead.delete(ahead.keys().next().value);
      for (const each of charts) each.mark(own);
      for (const each of texts) each.at.textContent = episode.texts[each.name][own] ?? "";
      marker.style.left = `${(100 * own) / Math.max(1, episode.length - 1)}%`;
    },
    end() { for (const each of charts) each.end(); ahead.clear(); },
  };
}

const laneText = (each) => `Fragment ${each.index}, chunk ${each.chunk}: steps ${each.step} to ${each.step + each.steps - 1}, `
  + `acted with versions ${each.version_min} to ${each.version_max}, appended ${clock(each.appended_at)} at staleness ${each.staleness_then}`
  + `${each.staleness_now === null ? "" : `, ${each.staleness_now} versions behind now`}${each.fate ? `, ${each.fate}` : ""}`;

const grantText = (each) => `granted ${clock(each.at)} at staleness ${each.staleness}${each.end ? `, ${each.end} ${clock(each.ended_at)}` : ", leased now"}`;
const lifeText = (each) => [...each.grants.map(grantText), each.fate ? `${each.fate}${each.left_at ? ` ${clock(each.left_at)}` : ""}` : "held"].join("; ");

/** A lane over time for each fragment: held, under which leases, and when it left. */
function lives(episode, go) {
  const shown = episode.lanes.slice(0, 40);
  const from = Math.min(...shown.map((each) => each.appended_at)), until = Math.max(episode.now, from + 1);
  const at = (time) => `${(100 * (Math.max(time, from) - from)) / (until - from)}%`;
  const span = (kind, start, end) => h("span", { class: kind, style: { left: at(start), right: `calc(100% - ${at(end)})` } });
  return h("figure", { class: "lives" },
    h("figcaption", {}, `Life of each fragment from ${clock(from)} to ${clock(until)}: held, leased (dark), left (mark)`),
    shown.map((each) => h("button", { type: "button", class: "life", title: lifeText(each), "aria-label": `Life of fragment ${each.index}: ${lifeText(each)}`, onclick: () => go(each.step) },
      h("span", {}, `${each.index}`), h("span", { class: "time" },
        each.is_held || each.left_at ? span("held", each.appended_at, each.left_at ?? until) : "",
        each.grants.map((grant) => span("leased", grant.at, grant.ended_at ?? until)),
        each.left_at ? span("left", each.left_at, each.left_at) : ""))));
}

const lanesTable = (episode) => h("details", {}, h("summary", {}, "The life of each fragment"),
  table("Fragments", ["#Fragment", "#Chunk", "#From step", "#Steps", "#Versions", "#Appended", "#Staleness then", "#Staleness now", "#Bytes", "What became of it"],
    episode.lanes.map((each) => [each.index, each.chunk, each.step, each.steps, `${each.version_min}–${each.version_max}`, clock(each.appended_at),
      each.staleness_then, number(each.staleness_now), bytes(each.bytes), lifeText(each)].map(String))));

async function showTokens(path, holder, go) {
  const found = await ask(`${path}/tokens`);
  const versions = [...new Set(found.map((each) => each.version))];
  holder.replaceChildren(h("h3", {}, "Tokens: the darker, the less likely; underlined by version"),
    h("p", { class: "tokens" }, found.map((each, at) => {
      const share = each.log_prob === null ? 0 : Math.min(1, -each.log_prob / 6);
      return h("button", { type: "button", class: `token v${versions.indexOf(each.version) % 4}`, style: { backgroundColor: `rgb(200 90 20 / ${(0.55 * share).toFixed(2)})` },
        title: `step ${at}: log-probability ${number(each.log_prob)}, version ${each.version}`, onclick: () => go(at) }, each.text);
    })));
}
