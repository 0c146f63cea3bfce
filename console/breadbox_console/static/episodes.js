// A list of episodes, filtered by fields and by the bins of a histogram.
import { ask, bufferPath, clock, h, number, table } from "./dom.js";
import { bars } from "./charts.js";

const FIELDS = [
  ["worker", "Worker", "select"], ["task", "Task", "select"], ["end", "End", "select"], ["held", "Where", "select"],
  ["text", "Text or tag", "search"], ["return_min", "Return from", "number"], ["return_max", "Return to", "number"],
  ["length_min", "Length from", "number"], ["length_max", "Length to", "number"],
  ["version_min", "Version from", "number"], ["version_max", "Version to", "number"],
];
const CHOICES = { end: ["terminated", "truncated", "running", "cut"], held: ["can be watched whole"] };

export function showEpisodes(main, app, at) {
  const buffer = at.path[0] ?? app.buffer;
  if (!buffer) return {};
  const here = bufferPath(buffer), query = at.query;
  const inputs = {}, list = h("div", {}), picture = h("div", {}), count = h("p", { role: "status" });
  const picked = new Set();
  let start = 0, timer = null, isAsking = false, hasEnded = false;

  const apply = () => {
    for (const [name, input] of Object.entries(inputs)) { if (input.value) query.set(name, input.value); else query.delete(name); }
    history.replaceState(null, "", `#/episodes/${encodeURIComponent(buffer)}${query.size ? `?${query}` : ""}`);
    start = 0;
    refresh();
  };
  const form = h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => { event.preventDefault(); apply(); } },
    FIELDS.map(([name, label, type]) => {
      inputs[name] = type === "select" ? h("select", { onchange: apply }) : h("input", { type, step: "any", onchange: apply });
      if (type !== "select") inputs[name].value = query.get(name) ?? "";
      return h("label", {}, label, inputs[name]);
    }),
    h("button", { type: "button", onclick: () => { query.set("sort", "return"); query.delete("down"); inputs.held.value = CHOICES.held[0]; apply(); } }, "Worst that can be watched"),
    h("button", { type: "button", onclick: () => { for (const each of Object.values(inputs)) each.value = ""; apply(); } }, "Clear"));
  const compare = h("button", { type: "button", disabled: true, onclick: () => {
    const [one, other] = [...picked];
    location.hash = `#/episode/${encodeURIComponent(buffer)}/${one}?with=${other}`;
  } }, "Compare two");
  main.append(h("h2", {}, `Episodes of ${buffer}`), form, picture, h("div", { class: "bar-row" }, count, compare), list);

  const fill = (name, values) => {
    const select = inputs[name], wanted = query.get(name) ?? "";
    const all = ["", ...new Set([...values, ...(wanted ? [wanted] : [])])];
    if (all.join("\n") === [...select.options].map((each) => each.value).join("\n")) return;
    select.replaceChildren(...all.map((each) => h("option", { value: each }, each || "any")));
    select.value = wanted;
  };

  async function refresh() {
    if (isAsking || hasEnded) return;
    isAsking = true;
    const asked_at = performance.now();
    clearTimeout(timer);
    try {
      const asked = new URLSearchParams(query);
      asked.set("start", start);
      const found = await ask(`${here}/episodes?${asked}`);
      if (hasEnded) return;
      fill("worker", found.workers);
      fill("task", found.tasks);
      count.textContent = `${number(found.total)} of ${number(found.all)} episodes seen, ${number(found.ended)} of them ended${found.kept ? `; what ${found.kept} sends is kept to be watched: filter by a worker to choose` : ""}`;
      // Bins stay as they are while one of them is focused: a key press must not lose its place.
      if (!picture.contains(document.activeElement)) drawHistogram(found.histogram);
      if (!list.contains(document.activeElement)) drawList(found);
    } catch (error) { count.textContent = error.message; } finally {
      isAsking = false;
      if (!hasEnded) timer = setTimeout(refresh, Math.max(1000, 4 * (performance.now() - asked_at)));
    }
  }

  function drawHistogram(found) {
    const entries = found.map((each) => ({ ...each, label: `returns ${number(each.from)} to ${number(each.to)}`, short: number(each.from) }));
    picture.replaceChildren(bars(`Returns of ended episodes, each bar from its number on${found.length ? `, to ${number(found[found.length - 1].to)}` : ""}: a bar filters`, entries, (bin) => {
      inputs.return_min.value = bin.from;
      inputs.return_max.value = bin.to;
      picture.querySelector("button:focus")?.blur();
      apply();
    }));
  }

  function drawList(found) {
    const sorting = (name, label) => h("button", { type: "button", class: "sort", onclick: () => {
      const isDown = query.get("sort") === name && !query.has("down");
      query.set("sort", name);
      if (isDown) query.set("down", "1"); else query.delete("down");
      document.activeElement.blur();
      apply();
    } }, `${label}${query.get("sort") === name ? (query.has("down") ? " ▼" : " ▲") : ""}`);
    const row = (each) => [
      h("input", { type: "checkbox", "aria-label": `Compare episode ${each.number}`, checked: picked.has(each.number), onchange: (event) => {
        if (event.target.checked) picked.add(each.number); else picked.delete(each.number);
        if (picked.size > 2) { const first = picked.values().next().value; picked.delete(first); }
        compare.disabled = picked.size !== 2;
      } }),
      h("a", { href: `#/episode/${encodeURIComponent(buffer)}/${each.number}` }, `${each.worker_id} #${each.episode_id}`),
      each.task, number(each.return), number(each.length), each.is_whole ? each.end : `${each.end}, without its start`,
      each.version_min === each.version_max ? number(each.version_min) : `${each.version_min}–${each.version_max}`,
      each.held === 1 ? (each.is_whole ? "yes" : "a part") : each.held ? `${Math.round(100 * each.held)} %` : "no", clock(each.last_seen_at), each.text,
    ];
    const headings = ["Compare", sorting("episode", "Episode"), "Task", ["#", sorting("return", "Return")], ["#", sorting("length", "Length")], "End", ["#", sorting("version", "Version")], "To watch", ["#", sorting("seen", "Seen")], "Tag"];
    list.replaceChildren(
      table("Ended episodes", headings, found.rows.map(row), "none fits"),
      h("p", { class: "bar-row" },
        h("button", { type: "button", disabled: start === 0, onclick: () => { start = Math.max(0, start - 200); document.activeElement.blur(); refresh(); } }, "Later"),
        h("button", { type: "button", disabled: start + 200 >= found.ended, onclick: () => { start += 200; document.activeElement.blur(); refresh(); } }, "Earlier")),
      found.parts.length ? table("Running or cut off, as far as seen", ["Compare", "Episode", "Task", "#Return", "#Length", "End", "#Version", "To watch", "#Seen", "Tag"], found.parts.map(row)) : "");
  }

  for (const [name, values] of Object.entries(CHOICES)) fill(name, values);
  refresh();
  return { end() { hasEnded = true; clearTimeout(timer); } };
}
