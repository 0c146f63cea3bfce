// Every buffer: why its learner waits, what flows, how fresh it is, and what is wrong.
import { ago, ask, bufferPath, bytes, clock, coded, h, number, table, versions } from "./dom.js";
import { bars, lines } from "./charts.js";

export function showOverview(main, app, at) {
  const cards = new Map();
  const server = h("div", {});
  const holder = h("div", { class: "cards" });
  main.append(h("h2", {}, "Overview"), server, holder);
  return {
    update(overview) {
      const concerns = overview.server.concerns ?? [];
      server.replaceChildren(h("p", { class: "hint" }, (overview.server.servers ?? []).join("; ")),
        ...(overview.problem && overview.buffers.length ? [h("p", { class: "problem warn" }, `The server cannot be asked: what follows is as it was at ${clock(overview.buffers[0].point[0])}.`)] : []),
        ...concerns.map((each) => h("p", { class: "problem warn" }, each)));
      for (const buffer of overview.buffers) {
        if (!cards.has(buffer.name)) cards.set(buffer.name, card(buffer));
        cards.get(buffer.name).update(buffer, overview.time);
      }
      // The chosen buffer first, the others as they are sorted: those in which nothing moves last.
      const names = overview.buffers.map((each) => each.name).sort((one, other) => (other === at.path[0]) - (one === at.path[0]));
      overview.buffers.forEach((each) => cards.get(each.name).fold(each.level === "idle" && each.name !== names[0]));
      for (const [name, each] of cards) {
        if (!names.includes(name)) { each.element.remove(); each.end(); cards.delete(name); }
      }
      const wanted = names.map((name) => cards.get(name).element);
      if (wanted.some((each, at) => holder.children[at] !== each)) holder.replaceChildren(...wanted);
      if (!names.length) holder.replaceChildren(h("p", { class: "empty" }, "There is no buffer that you may see."));
    },
    end() { for (const each of cards.values()) each.end(); },
  };
}

function card(first) {
  const title = h("h3", {}, first.name), seen = h("div", {}), counted = h("span", {}), badge = h("span", { class: "badge" });
  const said = h("div", { class: "said" }), facts = h("dl", { class: "facts" });
  const meters = h("div", { class: "meters" }), below = h("div", { class: "below" }), ages = h("div", {}), uses = h("div", {});
  const empty = [[], []];
  const flow = lines("Chunks in and out, per second", ["in", "out"], [[], [], []]);
  const held = lines("Chunks held", ["chunks"], empty);
  const stale = lines("Mean staleness held, versions", ["staleness"], empty);
  const version = lines("Model version", ["version"], empty);
  const charts = [flow, held, stale, version];
  const headline = h("span", { class: "headline" }), watch = h("span", {});
  const folded = h("details", {}, h("summary", {}, h("span", { class: "head" }, title, badge, headline)),
    said, h("p", {}, watch, h("a", { href: `#/episodes/${encodeURIComponent(first.name)}` }, "Episodes"), counted),
    facts, meters, seen, h("div", { class: "charts" }, charts.map((each) => each.element), ages, uses), below);
  const element = h("section", { class: "card", "aria-label": `Buffer ${first.name}` }, folded);
  let history = null, shown = "", isFolded = null;
  ask(`${bufferPath(first.name)}/history`).then((found) => { history = found; }, () => {});
  const names = ["time", "in", "out", "chunks", "version", "staleness"];

  return {
    element,
    end() { for (const each of charts) each.end(); },
    /** Fold or unfold; what the reader did stays until the buffer changes. */
    fold(next) { if (next !== isFolded) folded.open = !(isFolded = next); },
    update(buffer, now) {
      element.className = `card ${buffer.level}`;
      badge.textContent = buffer.status;
      badge.className = `badge ${buffer.level}`;
      // Text that did not change is left alone, so that a selection in it stays.
      const words = JSON.stringify([buffer.headline, buffer.advice]);
      if (words !== shown) {
        shown = words;
        headline.replaceChildren(...coded(buffer.headline));
        said.replaceChildren(buffer.advice.length ? h("ul", {}, buffer.advice.map((each) => h("li", {}, coded(each)))) : "");
      }
      if (history) {
        if (history.time[history.time.length - 1] !== buffer.point[0]) {
          names.forEach((name, at) => { history[name].push(buffer.point[at]); if (history[name].length > 900) history[name].shift(); });
        }
        flow.update([history.time, history.in, history.out]);
        held.update([history.time, history.chunks]);
        stale.update([history.time, history.staleness]);
        version.update([history.time, history.version]);
      }
      if (watch.dataset.number !== String(buffer.watch)) {
        watch.dataset.number = buffer.watch;
        watch.replaceChildren(...(buffer.watch === null ? [] : [h("a", { href: `#/episode/${encodeURIComponent(first.name)}/${buffer.watch}` }, "Watch the latest whole episode"), " · "]));
      }
      counted.textContent = `: ${number(buffer.episodes)} seen${buffer.skipped ? `; ${number(buffer.skipped)} chunks left before they were read` : ""}`;
      facts.replaceChildren(...listed([
        ["Session", buffer.session || "none"],
        ["Version", number(buffer.version)],
        ["In", `${number(buffer.rates["chunks completed"])} chunks/s`],
        ["Out", `${number(buffer.rates["chunks delivered"])} chunks/s`],
        ["Learners waiting", `${number(buffer.waiters)}${buffer.waiting_reason ? `, as ${buffer.waiting_reason}` : ""}`],
        ["Learner waited", buffer.waiting_share === null ? "–" : `${Math.round(100 * buffer.waiting_share)} % of the time seen`],
        ["Leases", `${buffer.leases}${buffer.leases_max ? ` of ${buffer.leases_max}` : ""}`],
        ["Steps", Object.entries(buffer.steps).map(([end, count]) => `${number(count)} ${end}`).join(", ") || "not reported"],
        ["Evicted", `${number(buffer.rates["chunks evicted as stale"])}/s as stale, ${number(buffer.rates["chunks evicted for room"])}/s for room`],
      ]));
      meters.replaceChildren(
        meter("Chunks", buffer.chunks, buffer.capacity_chunks, number),
        meter("Bytes", buffer.bytes, buffer.capacity_bytes, bytes));
      const staleness = Object.entries(buffer.staleness).map(([age, count]) => ({ label: `staleness ${age}`, short: age, count }))
        .sort((a, b) => a.short - b.short);
      ages.replaceChildren(bars(`Chunks by staleness${buffer.staleness_max === null ? "" : `, limit ${buffer.staleness_max}`}`, staleness));
      uses.replaceChildren(bars("Chunks that left, by their uses",
        Object.entries(buffer.uses).map(([count, chunks]) => ({ label: `uses ${count}`, short: count, count: chunks }))));
      seen.replaceChildren(workers(buffer));
      below.replaceChildren(batch(buffer, now), leaving(buffer),
        table("Subscriptions", ["Name", "#Chunks behind", "#Bytes behind", "#Seconds", "#Missed"],
          buffer.subscriptions.map((each) => [each.name, number(each.lag_chunk_count), bytes(each.lag_bytes), number(each.lag_s), number(each.missed_chunk_count)])),
        h("section", {}, h("h4", {}, "Recent events"), buffer.events.length
          ? h("ul", { class: "events" }, buffer.events.map((each) => h("li", { class: each.kind }, h("time", {}, clock(each.time)), ` ${each.text}`)))
          : h("p", { class: "empty" }, "none since the console began to watch")));
    },
  };
}

const listed = (pairs) => pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
const list = (pairs) => h("dl", { class: "facts five" }, listed(pairs));

function meter(name, value, most, words) {
  const share = most ? Math.min(1, value / most) : 0;
  return h("div", { class: "meter" }, h("span", {}, `${name}: ${words(value)}${most ? ` of ${words(most)}` : ""}`),
    h("span", { class: "track" }, h("span", { class: share > 0.95 ? "fill full" : "fill", style: { width: `${100 * share}%` } })));
}

function batch(buffer, now) {
  const each = buffer.batch, limit = buffer.staleness_max === null ? "no limit" : `limit ${buffer.staleness_max}`;
  const share = (pairs, words) => pairs.map(([name, count]) => `${words(name)} ${Math.round((100 * count) / each.fragments)} %`).join(", ");
  return h("section", {}, h("h4", {}, "Latest batch"), each ? list([
    ["Granted", `${ago(now - each.granted_at)}, at version ${number(each.version)}`],
    ["Chunks", `${number(each.chunks)}${each.fragments ? `, acted with ${versions(each)}` : ""}`],
    ["Staleness when granted", `${each.staleness.map((age) => number(age)).join(" / ")} (min / median / max), ${limit}`],
    ...(each.fragments ? [["Uses", `${share(each.uses, (uses) => `use ${uses}:`)}, of ${buffer.uses_max ?? "any number"}`],
      ["By worker", share(each.workers, (name) => name)]] : []),
  ]) : h("p", { class: "empty" }, "No fetch was granted since the console began to watch."));
}

function leaving(buffer) {
  const of = (value, limit) => `${number(value)} of ${limit ?? "any"}`;
  return h("section", {}, h("h4", {}, "What leaves next, and why"),
    table("Chunks nearest to leaving, of those held longest", ["Chunk", "#Staleness", "#Uses", "Leaves"],
      buffer.next_out.chunks.map((each) => [`chunk ${each.chunk} of ${each.worker}`, of(each.age, buffer.staleness_max), of(each.uses, buffer.uses_max), each.leaves]), "none held"),
    h("ul", {}, buffer.next_out.limits.map((each) => h("li", {}, each))));
}

function workers(buffer) {
  const rows = buffer.workers.map((each) => ({
    level: each.problems.length ? "warn" : null,
    cells: [h("a", { href: `#/episodes/${encodeURIComponent(buffer.name)}?worker=${encodeURIComponent(each.name)}` }, each.name),
      h("div", { class: "problems" }, each.problems.join("; ") || "none"), number(each.rate), number(each.version), number(each.behind), each.trained === null ? "–" : `${Math.round(100 * each.trained)} %`, number(each.fragment_versions), number(each.mean_return), ago(each.silent_s)],
  }));
  return table(`Workers seen, ${rows.length} of ${Math.max(rows.length, buffer.worker_count)}`,
    ["Worker", "Problems", "#Fragments/s", "#Version", "#Most behind", "#Steps trained on", "#Versions per fragment", "#Mean return", "#Last seen"], rows, "none yet");
}
