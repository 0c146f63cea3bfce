// Lines over time or steps, drawn by uPlot, in the page's colours.
import { clock, h } from "./dom.js";

const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
/** Times of day, with seconds where ticks are closer than a minute. */
const times = (_, ticks, axis, space, apart) => ticks.map((each) => clock(each).slice(0, apart < 60 ? 8 : 5));
/** From the first x on, at least 10 s or a step wide: one alone would span a day, or a year. */
const wide = (least) => (_, low, high) => (low === null ? [0, least] : [low, Math.max(high, low + least)]);
/** Room for the longest label. */
const room = (_, labels) => Math.max(40, 16 + 7 * Math.max(0, ...(labels ?? []).map((each) => each?.length ?? 0)));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Draw lines. Returns {element, update(columns), mark(x)}.
// columns: [x, y1, y2, ...], lists of equal length; null where there is no value: a gap, or spanned.
export function lines(title, names, columns, { isTime = true, height = 110, onPick = null, xs = null, hasPoints = false, spanGaps = false } = {}) {
  const holder = h("div", { class: "plot" });
  const none = h("p", { class: "empty" }, "no data");
  const element = h("figure", { class: "chart" }, h("figcaption", {}, title), none, holder);
  const tell = () => { holder.hidden = !(none.hidden = columns.slice(1).some((each) => each.some((value) => value !== null && value !== undefined))); };
  tell();
  let plot = null, marked = null;
  const options = () => ({
    width: Math.max(120, holder.clientWidth || 300),
    height,
    padding: [null, 30, null, null],
    scales: { x: { time: isTime, range: xs ?? wide(isTime ? 10 : 1) }, y: { range: (_, low, high) => (low === null ? [0, 1] : low === high ? [low && low - 1, high + 1] : window.uPlot.rangeNum(low, high, 0.1, true)) } },
    legend: { show: names.length > 1, live: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    axes: [
      { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, size: 26, space: 74, font: "11px system-ui", ...(isTime ? { values: times } : {}) },
      { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, size: room, space: 22, font: "11px system-ui" },
    ],
    series: [{}, ...names.map((label, at) => ({
      label, stroke: colour(COLOURS[at % COLOURS.length]), width: 1.5, spanGaps, points: { show: hasPoints, size: 3 }, paths: hasPoints ? () => null : undefined,
    }))],
    hooks: {
      draw: [(drawn) => {
        if (marked === null) return;
        const x = drawn.valToPos(marked, "x", true);
        drawn.ctx.save();
        drawn.ctx.strokeStyle = colour("--mark");
        drawn.ctx.lineWidth = 2;
        drawn.ctx.beginPath();
        drawn.ctx.moveTo(x, drawn.bbox.top);
        drawn.ctx.lineTo(x, drawn.bbox.top + drawn.bbox.height);
        drawn.ctx.stroke();
        drawn.ctx.restore();
      }],
    },
  });
  const draw = () => {
    plot?.destroy();
    plot = new window.uPlot(options(), columns, holder);
    const canvas = holder.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${title}: ${names.join(", ")}`);
    if (onPick) plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null) onPick(columns[0][plot.cursor.idx]); });
  };
  const watcher = new ResizeObserver(() => {
    if (!holder.isConnected) return;
    if (!plot) draw();
    else if (Math.abs(plot.width - holder.clientWidth) > 2) plot.setSize({ width: Math.max(120, holder.clientWidth), height });
  });
  watcher.observe(holder);
  return {
    element,
    update(next) { columns = next; tell(); if (plot) plot.setData(next); },
    mark(x) { marked = x; if (plot) plot.redraw(false, false); },
    end() { watcher.disconnect(); plot?.destroy(); plot = null; },
  };
}

/** Bars of counts. With onPick each bar is a button that picks its entry. */
export function bars(title, entries, onPick = null) {
  const most = Math.max(1, ...entries.map((each) => each.count));
  const isMany = entries.length > 8, every = isMany ? Math.ceil(entries.length / 6) : 1;
  return h("figure", { class: isMany ? "chart bars many" : "chart bars" }, h("figcaption", {}, title),
    entries.length ? "" : h("p", { class: "empty" }, "no data"),
    h("div", { class: "row", hidden: !entries.length }, entries.map((each) => {
      const label = `${each.label}: ${each.count}`;
      const bar = h("span", { class: "bar", style: { height: `${Math.max(each.count ? 4 : 0, (85 * each.count) / most)}%` } });
      const inside = [h("span", { class: "count" }, each.count || ""), bar];
      return onPick
        ? h("button", { type: "button", class: "slot", title: label, "aria-label": label, "aria-pressed": String(Boolean(each.on)), onclick: () => onPick(each) }, inside)
        : h("span", { class: "slot", role: "img", title: label, "aria-label": label }, inside);
    })),
    h("div", { class: "ends" }, entries.map((each, at) => h("span", {}, at % every ? "" : each.short))));
}
