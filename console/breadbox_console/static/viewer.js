// One episode, or two side by side: every stream on one transport.
import { ask, bufferPath, clock, h, number, versions } from "./dom.js";
import { lines } from "./charts.js";

const AHEAD = 12;

export function showEpisode(main, app, at) {
  const [buffer, one] = at.path;
  const numbers = [one, at.query.get("with")].filter(Boolean);
  const sides = [];
  let step = Number(at.query.get("step") ?? 0) - 1, last = 0, timer = null, hasEnded = false;

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
    shown.textContent = `step ${step + 1} of ${last + 1}`;
    for (const side of sides) side.show(step);
    const query = new URLSearchParams(at.query);
    query.set("step", step + 1);
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
    last = Math.max(0, ...found.map((each) => each.seen - 1));
    slider.max = last;
    for (const each of found) { const side = makeSide(buffer, each, go); sides.push(side); holder.append(side.element); }
    go(step < 0 ? Math.min(...sides.map((side) => side.firstHeld)) : step);
  }, (error) => { if (!hasEnded) holder.append(h("p", { class: "bad", role: "alert" }, error.message)); });
  return { end() { hasEnded = true; clearInterval(timer); document.removeEventListener("keydown", key); for (const each of sides) each.end(); } };
}

const valueAt = (series, step) => series.values[Math.floor(step / series.stride)];
const ofSteps = (from, count) => (count === 1 ? `step ${from + 1}` : `steps ${from + 1} to ${from + count}`);

/** Lanes side by side of which `same` says that they are one. */
const merged = (lanes, same) => lanes.reduce((found, each) => {
  const last = found[found.length - 1];
  if (last && same(last, each)) last.steps += each.steps; else found.push({ ...each });
  return found;
}, []);

function makeSide(buffer, episode, go) {
  const path = `${bufferPath(buffer)}/episodes/${episode.number}`;
  const url = (stream, step) => `${path}/frame/${step}?stream=${encodeURIComponent(stream)}`;
  const missing = merged(episode.lanes.filter((each) => each.is_missing), (one, next) => one.step + one.steps === next.step && lost(one) === lost(next));
  const gapAt = (step) => missing.find((each) => each.step <= step && step < each.step + each.steps);
  const images = episode.streams.filter((each) => each.kind === "image").map((each) => {
    const none = each.type === "renderer" ? "no rendering, or not held any more" : "not held any more";
    const holder = h("div", {}), frames = new Map();
    return { holder, none, frames, url: (step) => url(each.path, step), name: each.path,
      figure: h("figure", {}, h("figcaption", {}, `${each.path} ${each.type}`), holder) };
  });
  let current = -1;
  /** The frame of a step, once it is decoded; loads it unless it was loaded ahead. */
  const frame = (each, step) => {
    if (!each.frames.has(step)) {
      const image = h("img", { alt: each.name, src: each.url(step) });
      const width = () => image.style.width = `${image.naturalWidth * Math.ceil(400 / image.naturalWidth)}px`;
      each.frames.set(step, image.decode().then(() => { width(); return image; }, () => { each.frames.delete(step); return h("p", { class: "empty" }, each.none); }));
      if (each.frames.size > 8 * AHEAD) each.frames.delete(each.frames.keys().next().value);
    }
    return each.frames.get(step);
  };
  const showFrame = async (each, step) => {
    each.figure.setAttribute("aria-busy", "true");
    const found = await frame(each, step);
    if (step !== current) return;
    each.holder.replaceChildren(found);
    each.figure.removeAttribute("aria-busy");
    for (let next = step + 1; next <= Math.min(step + AHEAD, episode.seen - 1); next += 1) if (!gapAt(next)) frame(each, next);
  };
  const pictures = episode.streams.filter((each) => each.kind === "picture").map((each) => h("figure", { class: "wide" },
    h("figcaption", {}, `${each.path} ${each.type}: a column for each step`),
    h("img", { alt: `${each.path} over all steps`, loading: "lazy", src: `${path}/picture?stream=${encodeURIComponent(each.path)}` })));
  const isWhole = (name) => /^u?int/.test(episode.streams.find((each) => each.path === name)?.type ?? "");
  const hidden = ["first", "episode_id", "extras.episode_return", "extras.episode_length"], order = ["reward", "value", "log_prob", "model_version", "action"];
  const series = Object.fromEntries(Object.entries({ reward: [episode.rewards], ...episode.series }).filter(([name, each]) => each[0]?.values.length && !hidden.includes(name))
    .sort(([one], [other]) => (order.indexOf(one) + 9) % 9 - (order.indexOf(other) + 9) % 9));
  const constants = [], charts = [], ids = [];
  const isText = episode.tokens.length > 0 && !images.length;
  for (const [name, each] of Object.entries(series)) {
    const known = each.map((one) => one.values.filter((value) => value !== null));
    if (known.every((one) => one.every((value) => value === one[0]))) { constants.push(`${name} ${known.map((one) => number(one[0])).join(", ")}`); continue; }
    const xs = each[0].values.map((_, place) => place * each[0].stride + 1);
    const drawn = lines(name, each.map((_, place) => (each.length > 1 ? `[${place}]` : name)), [xs, ...each.map((one) => one.values)],
      { isTime: false, height: 90, xs: [1, Math.max(2, episode.seen)], hasPoints: isWhole(name), onPick: (x) => go(x - 1) });
    charts.push(drawn);
    if (isText && isWhole(name) && name !== "model_version") ids.push(drawn);
  }
  const texts = Object.keys(episode.texts).map((name) => ({ name, at: h("p", { class: "text" }) }));
  const tokens = h("div", {}), readout = h("dl", { class: "readout", "aria-label": "At the cursor" }), marker = h("span", { class: "cursor" });
  const runs = merged(episode.lanes, (one, next) => one.version_min === next.version_min && one.version_max === next.version_max && one.is_held === next.is_held);
  const lane = h("div", { class: "lanes" }, runs.map((each) => h("button", {
    type: "button", class: each.is_held ? "lane" : "lane gone", style: { flexGrow: String(each.steps) },
    title: runText(each), "aria-label": runText(each), onclick: () => go(each.step),
  }, each.steps > 0.07 * episode.seen ? `v${each.version_min}${each.version_max === each.version_min ? "" : `–${each.version_max}`}` : "")), marker);
  const element = h("section", { class: "side", "aria-label": `Episode ${episode.number}` },
    h("h2", {}, `${episode.worker_id} #${episode.episode_id}`),
    h("p", {}, `Task ${episode.task}; return ${number(episode.return)}; ${episode.seen < episode.length ? `${number(episode.seen)} seen of ` : ""}${number(episode.length)} steps; ${episode.end}; ${versions(episode)}`),
    h("p", { class: "bar-row" }, missing.length ? "" : h("a", { href: `${path}/file.parquet`, download: "" }, "Parquet"),
      !missing.length && images.some((each) => each.name !== "(rendered)") ? h("a", { href: `${path}/file.mp4`, download: "" }, "MP4") : "",
      isText ? h("button", { type: "button", onclick: () => showTokens(episode, tokens, go) }, "Show actions as tokens") : ""),
    missing.length ? h("details", { class: "problem warn", open: missing.length <= 3 },
      h("summary", {}, `${missing.reduce((sum, each) => sum + each.steps, 0)} of ${number(episode.seen)} steps are not held any more`),
      h("ul", {}, missing.map((each) => h("li", {}, `${ofSteps(each.step, each.steps)}: ${lost(each)}`)))) : "",
    missing.length && missing.reduce((sum, each) => sum + each.steps, 0) === episode.seen ? h("p", {}, h("a", { href: `#/episodes/${encodeURIComponent(buffer)}?held=can+be+watched+whole` }, "Episodes that can be watched whole")) : "",
    readout, tokens, h("div", { class: images.length ? "player" : "" }, h("div", { class: "images" }, images.map((each) => each.figure)),
      h("div", {}, charts.filter((each) => !ids.includes(each)).map((each) => each.element),
        ids.length ? h("details", {}, h("summary", {}, "Token ids"), ids.map((each) => each.element)) : "",
        constants.length ? h("p", { class: "hint" }, `The same at each step: ${constants.join("; ")}`) : "")),
    texts.map((each) => h("div", {}, h("h3", {}, each.name), each.at)), h("div", { class: "images" }, pictures),
    h("h3", {}, "Fragments, by the versions that acted"), lane, lives(episode, go));
  return {
    element,
    firstHeld: Math.max(0, [...Array(episode.seen).keys()].findIndex((step) => !gapAt(step))),
    isLoading: () => images.some((each) => each.figure.ariaBusy),
    show(step) {
      const own = current = Math.min(step, episode.seen - 1), gap = gapAt(own);
      for (const each of images) {
        if (gap) { each.holder.replaceChildren(h("p", { class: "empty" }, lost(gap))); each.figure.removeAttribute("aria-busy"); } else showFrame(each, own);
      }
      for (const each of charts) each.mark(own + 1);
      for (const each of texts) each.at.textContent = episode.texts[each.name][own] ?? "";
      readout.replaceChildren(...Object.entries(series).map(([name, each]) => h("div", {}, h("dt", {}, name), h("dd", {}, each.map((one) => number(valueAt(one, own))).join(", ")))));
      marker.style.left = `${(100 * own) / Math.max(1, episode.seen - 1)}%`;
    },
    end() { for (const each of charts) each.end(); current = -1; },
  };
}

/** When and why a lane's steps are missing. */
const lost = (each) => `${each.fate}${each.left_at ? ` at ${clock(each.left_at)}` : ""}`;
const runText = (each) => `${ofSteps(each.step, each.steps)}: ${versions(each)}${each.is_held ? "" : ", not held"}`;

const grantText = (each) => `granted ${clock(each.at)} at staleness ${each.staleness}${each.end ? `, ${each.end} ${clock(each.ended_at)}${each.staleness_at_end === null ? "" : ` at staleness ${each.staleness_at_end}`}` : ", leased now"}`;
const lifeText = (each) => [`chunk ${each.chunk_id}, ${ofSteps(each.step, each.steps)}, ${versions(each)}`,
  `appended ${clock(each.appended_at)} at staleness ${each.staleness}${each.staleness_now === null ? "" : `, ${each.staleness_now} now`}`,
  ...each.grants.map(grantText), each.fate ? lost(each) : "held"].join("; ");

/** A lane over time for each fragment: held, under which leases, and when it left. */
function lives(episode, go) {
  const shown = episode.lanes.slice(0, 40);
  const from = Math.min(...shown.map((each) => each.appended_at)), until = Math.max(episode.now, from + 1);
  const at = (time) => `${(100 * (Math.max(time, from) - from)) / (until - from)}%`;
  const span = (kind, start, end) => h("span", { class: kind, style: { left: at(start), right: `calc(100% - ${at(end)})` } });
  return h("details", { class: "lives", open: shown.length <= 10 },
    h("summary", {}, `Life of each fragment from ${clock(from)} to ${clock(until)}: held, leased (dark), left (mark)`),
    shown.map((each) => h("button", { type: "button", class: "life", title: lifeText(each), "aria-label": `Life of fragment ${each.index}: ${lifeText(each)}`, onclick: () => go(each.step) },
      h("span", {}, `${each.index}`), h("span", { class: "time" },
        each.is_held || each.left_at ? span("held", each.appended_at, each.left_at ?? until) : "",
        each.grants.map((grant) => span("leased", grant.at, grant.ended_at ?? until)),
        each.left_at ? span("left", each.left_at, each.left_at) : ""))));
}

function showTokens(episode, holder, go) {
  const [versionAt, logProbAt] = ["model_version", "log_prob"].map((name) => (place) => {
    const found = episode.series[name]?.[0];
    return found?.stride === 1 ? found.values[place] : null;
  });
  const seen = [...new Set(episode.tokens.map((_, place) => versionAt(place)))];
  holder.replaceChildren(h("h3", {}, "Tokens: the darker, the less likely; underlined by version"),
    h("p", { class: "tokens" }, episode.tokens.map((text, place) => {
      const share = Math.min(1, -(logProbAt(place) ?? 0) / 6);
      return h("button", { type: "button", class: `token v${seen.indexOf(versionAt(place)) % 4}`, style: { backgroundColor: `rgb(200 90 20 / ${(0.55 * share).toFixed(2)})` },
        title: `step ${place + 1}: log-probability ${number(logProbAt(place))}, version ${number(versionAt(place))}`, onclick: () => go(place) }, text);
    })));
}
