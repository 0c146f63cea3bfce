// Returns over time and steps, staleness at arrival, grant and release, and waiting learners.
import { ask, bufferPath, h } from "./dom.js";
import { lines } from "./charts.js";

export function showLearning(main, app, at) {
  const buffer = at.path[0] ?? app.buffer;
  if (!buffer) return {};
  const by = h("select", {}, ["all", "task", "worker"].map((each) => h("option", { value: each }, each)));
  const axis = h("select", {}, [["steps", "environment steps"], ["time", "time"]].map(([value, text]) => h("option", { value }, text)));
  const holder = h("div", { class: "charts wide" });
  main.append(h("h2", {}, `Learning in ${buffer}`),
    h("div", { class: "filters" }, h("label", {}, "One line for each", by), h("label", {}, "Over", axis)), holder);
  let charts = [], timer = null, hasEnded = false;

  async function refresh() {
    clearTimeout(timer);
    try {
      const found = await ask(`${bufferPath(buffer)}/learning?by=${by.value}`);
      if (!hasEnded) draw(found);
    } catch (error) { holder.replaceChildren(h("p", { class: "bad" }, error.message)); }
    if (!hasEnded) timer = setTimeout(refresh, 3000);
  }

  function draw(found) {
    for (const each of charts) each.end();
    charts = [];
    const { returns, training } = found, names = Object.keys(returns), isTime = axis.value === "time";
    for (const [title, field] of names.length ? [["Return of episodes", "return"], ["Staleness at arrival, versions", "staleness"]] : []) {
      charts.push(lines(title, names, joined(names.map((name) => [returns[name][axis.value], returns[name][field]])), { isTime, height: 240, spanGaps: true }));
    }
    for (const [title, names] of training.time ? [["Staleness when granted, and when released after training, versions", ["granted", "released"]], ["Share of time that the learner waited", ["waiting"]]] : []) {
      charts.push(lines(title, names, [training.time, ...names.map((name) => training[name])], { height: 160, spanGaps: true }));
    }
    holder.replaceChildren(names.length ? "" : h("p", { class: "empty" }, "No episode has ended since the console began to watch."), ...charts.map((each) => each.element));
  }

  by.addEventListener("change", refresh);
  axis.addEventListener("change", refresh);
  refresh();
  return {
    end() { hasEnded = true; clearTimeout(timer); for (const each of charts) each.end(); },
  };
}

/** Put series with xs of their own on one x axis: null where a series has no point. */
function joined(series) {
  const xs = [...new Set(series.flatMap(([x]) => x))].sort((a, b) => a - b);
  return [xs, ...series.map(([x, y]) => { const at = new Map(x.map((each, index) => [each, y[index]])); return xs.map((each) => at.get(each) ?? null); })];
}
