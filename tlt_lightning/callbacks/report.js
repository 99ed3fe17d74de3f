"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const { metrics, iterations, details } = data;
const main = document.querySelector("main"), SVG = document.getElementById("svg").namespaceURI;

// Elements. Texts become text nodes and never markup: completions may hold anything.
function set(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (tag, attributes, ...children) => set(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => set(document.createElementNS(SVG, tag), attributes, children);
const color = (name) => `var(--${name})`;
const key = (name) => h("i", { class: "key", style: { background: color(name) } });

// Numbers
const grouped = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && size < 0.001) return value.toExponential(1);
  return Number.isInteger(value) || size >= 100 ? grouped(value, 0) : grouped(value, size >= 10 ? 1 : size >= 1 ? 2 : 3);
}
const percent = (value) => (value === null || value === undefined ? "–" : grouped(100 * value, value && Math.abs(value) < 0.1 ? 1 : 0) + "%");
const short = (text) => text.replace(/(\.\d*?)0+(?=\D*$)/, "$1").replace(/\.(?=\D*$)/, "");
function duration(seconds) {
  if (seconds < 100) return `${format(seconds)} s`;
  if (seconds < 570) return `${short(grouped(seconds / 60, 1))} min`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const has = (name) => (metrics[name] || []).some((value) => value !== null);
const named = (prefix) => Object.keys(metrics).filter((name) => name.startsWith(prefix) && has(name));
const points = (name) => (metrics[name] || []).map((y, i) => [iterations[i], y]).filter((point) => point[1] !== null);
const last = (name) => (points(name).at(-1) || [null, null])[1];

// Charts
const MINUTES = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000]; // seconds, for axes of time
function ticks(low, high, count, show) {
  const rough = (high - low) / count || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const steps = show === duration && rough > 20 ? MINUTES : [1, 2, 5, 10].map((factor) => factor * unit);
  const step = steps.find((size) => size >= rough * 0.999) ?? 10 * unit;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(Number((value + 0).toFixed(12)));
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let unit = 10 ** Math.floor(Math.log10(low)); unit <= high; unit *= 10)
    for (const factor of high / low > 300 ? [1] : [1, 2, 5]) if (factor * unit >= low && factor * unit <= high) found.push(factor * unit);
  return found.length > 1 ? found : ticks(low, high, 4);
}
function averaged(points, width) { // the running mean of so many points around each
  const sums = [0];
  for (const point of points) sums.push(sums.at(-1) + point[1]);
  return points.map(([x], i) => {
    const from = Math.max(0, i - (width >> 1)), to = Math.min(points.length, i + (width >> 1) + 1);
    return [x, (sums[to] - sums[from]) / (to - from)];
  });
}
const observer = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.draw()));
const tip = h("div", { id: "tip", hidden: "" });

/* Draws series [{name, color, points: [[x, y]], dots, dashed, line}] over x. `stacked` piles bars of the same x on each
   other, `bar` wide in x. Others: log, zero (the axis begins there), top (where it ends), marks [[x, label]], show (of
   values), xName, height, note; a series' `value` stands in the legend for its last one. A series of a stacked chart with `line` stays a line. */
function chart(title, series, options = {}) {
  series = series.filter((one) => one.points.length);
  if (!series.length) return null;
  const { stacked, log, marks = [], show = format, xName = "iteration", height = 190 } = options;
  const bars = stacked ? series.filter((one) => !one.line) : [], lines = stacked ? series.filter((one) => one.line) : series;
  const maps = new Map(series.map((one) => [one, new Map(one.points)]));
  const xs = [...new Set(series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  const tops = xs.map((x) => bars.reduce((sum, one) => sum + (maps.get(one).get(x) || 0), 0));
  const values = [...lines.flatMap((one) => one.points.map((point) => point[1])), ...(stacked ? tops : [])];
  if (log) for (let i = values.length; i--; ) if (values[i] <= 0) values.splice(i, 1);
  let low = stacked || options.zero ? Math.min(0, ...values) : Math.min(...values), high = options.top ?? Math.max(...values);
  if (log) [low, high] = [low / 1.15, high * 1.15];
  else if (!(high > low)) [low, high] = [low - (low === 0 ? 0 : 0.5), high + 0.5];
  else if (!stacked && options.top === undefined) [low, high] = [low - (options.zero ? 0 : 0.06 * (high - low)), high + 0.06 * (high - low)];
  const window = options.bar ? 0 : Math.round(Math.max(...lines.map((one) => (one.dots ? 0 : one.points.length)), 0) / 60);
  const smooth = window > 2, notes = [options.note, smooth ? `bold: mean of ${window} iterations` : ""].filter(Boolean).join("; ");
  const half = (options.bar ?? 0.8) / 2, edges = options.bar ? [xs[0], xs.at(-1)] : [Math.min(xs[0], iterations[0]), iterations.at(-1)];
  const ends = stacked ? [edges[0] - half, edges[1] + half] : edges;
  const svg = s("svg", { height, role: "img", "aria-label": title });
  const left = 46, bottom = 20, top = marks.length ? 16 : 6;
  let place;

  svg.draw = () => {
    const width = svg.clientWidth;
    if (!width || svg.drawn === width) return;
    svg.drawn = width;
    const span = ends[1] - ends[0], x = (value) => (span ? left + ((value - ends[0]) / span) * (width - left - 8) : (left + width) / 2);
    const level = log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    const y = (value) => height - bottom - level(value) * (height - bottom - top);
    const parts = [];
    for (const value of log ? logTicks(low, high) : ticks(low, high, 4, show)) {
      parts.push(s("line", { class: "gridline", x1: left, x2: width - 8, y1: y(value), y2: y(value) }));
      parts.push(s("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, short(show(value))));
    }
    const wanted = ticks(ends[0], ends[1], Math.max(2, width / 65)).filter((value) => options.bar || Number.isInteger(value));
    for (const value of xs.length === 1 && !options.bar ? xs : wanted)
      parts.push(s("text", { x: x(value), y: height - 4, "text-anchor": "middle" }, short(format(value))));
    marks.forEach(([value, label], i) => {
      parts.push(s("line", { class: "mark", x1: x(value), x2: x(value), y1: top, y2: height - bottom }));
      if (i % Math.ceil(marks.length / 20) === 0) parts.push(s("text", { x: x(value), y: 10, "text-anchor": "middle" }, label));
    });
    const base = xs.map(() => 0), pixels = Math.min(26, span ? ((2 * half) / span) * (width - left - 8) + (options.bar ? 0.5 : 0) : 26);
    for (const one of bars) {
      let path = "";
      xs.forEach((value, i) => {
        const size = maps.get(one).get(value) || 0;
        if (size <= 0) return;
        const lower = y(base[i]), upper = y((base[i] += size));
        path += `M${(x(value) - pixels / 2).toFixed(1)} ${lower.toFixed(1)}h${pixels.toFixed(2)}V${upper.toFixed(1)}h${(-pixels).toFixed(2)}z`;
      });
      parts.push(s("path", { d: path, style: { fill: color(one.color) } }));
    }
    for (const one of lines) {
      const seen = one.points.filter((point) => !log || point[1] > 0);
      const stroke = { fill: "none", stroke: color(one.color), "stroke-width": one.thin ? 1.3 : 2, "stroke-linejoin": "round" };
      if (one.dashed) stroke["stroke-dasharray"] = "4 4";
      const draw = (shown, more) => parts.push(s("path", { d: "M" + shown.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("L"), style: { ...stroke, ...more } }));
      if (!one.dots) draw(seen, smooth ? { opacity: 0.3, "stroke-width": 1 } : {});
      if (!one.dots && smooth) draw(averaged(seen, window));
      if (one.dots || seen.length <= 30) for (const [a, b] of seen) parts.push(s("circle", { cx: x(a), cy: y(b), r: one.dots && seen.length <= 60 ? 3.2 : one.dots ? 1.8 : 2.4, style: { fill: color(one.hollow ? "card" : one.color), stroke: color(one.color), "stroke-width": 1.4 } }));
    }
    const cross = s("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    svg.replaceChildren(...parts, cross);
    place = (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      const near = xs.reduce((best, value) => (Math.abs(x(value) - at) < Math.abs(x(best) - at) ? value : best), xs[0]);
      set(cross, { x1: x(near), x2: x(near), visibility: "visible" }, []);
      const rows = series.filter((one) => maps.get(one).has(near) && !(bars.includes(one) && !maps.get(one).get(near)));
      tip.replaceChildren(h("b", {}, options.bar ? `${format(near)} s` : `${xName} ${near}`), ...rows.map((one) => h("div", {}, h("span", {}, key(one.color), one.name), h("b", {}, show(maps.get(one).get(near))))));
      tip.hidden = false;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6))}px`;
      tip.style.top = `${event.clientY + 16 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 16}px`;
    };
  };
  svg.addEventListener("pointermove", (event) => place && place(event));
  svg.addEventListener("pointerdown", (event) => place && place(event));
  svg.addEventListener("pointerleave", () => { tip.hidden = true; svg.lastChild?.setAttribute("visibility", "hidden"); });
  observer.observe(svg);
  const legend = series.length > 1 || options.latest ? h("div", { class: "legend" }, ...series.map((one) => h("span", {}, key(one.color), one.name, " ", options.bar ? null : h("b", {}, one.value ?? show(one.points.at(-1)[1]))))) : null;
  return h("div", { class: `card ${options.wide ? "wide" : ""}` }, h("h3", {}, title), notes ? h("div", { class: "soft" }, notes) : null, legend, svg);
}
function section(title, ...cards) {
  cards = cards.filter(Boolean);
  if (cards.length) main.append(h("h2", {}, title), h("div", { class: "grid" }, ...cards));
}
const line = (name, tint, label, more) => ({ name: label || name, color: tint, points: points(name), ...more });
const PALETTE = ["blue", "orange", "green", "purple", "yellow", "sky", "pink", "grey"];

// Head
document.title = data.title;
const [word] = data.state.split(" ");
main.append(h("header", {}, h("h1", {}, data.title), h("span", { class: `state ${word}` }, data.state),
  h("span", { class: "soft" }, `written ${data.written}${word === "running" ? ", reload for news" : ""}`)));
const tile = (label, value, note) => h("div", { class: "card tile" }, h("span", { class: "soft" }, label), h("b", {}, value, note ? h("small", {}, ` ${note}`) : null));
const accuracy = last("val/accuracy"), first = points("reward/mean")[0];
main.append(h("div", { class: "tiles" },
  tile("iterations", format(iterations.at(-1)), data.planned > 0 ? `of ${format(data.planned)}` : ""),
  tile("time", duration(data.seconds)),
  has("reward/mean") ? tile("mean reward", format(last("reward/mean")), iterations.length > 1 ? `from ${format(first[1])}` : "") : null,
  accuracy === null ? null : tile("held-out accuracy", percent(accuracy), data.before === null ? "" : `from ${percent(data.before)}`),
  has("rollout/tokens_per_s") ? tile("rollout", format(last("rollout/tokens_per_s")), "tokens/s") : null,
  has("speculation/acceptance_length") ? tile("acceptance", format(last("speculation/acceptance_length")), "tokens/step") : null));

// Learning
const some = (name) => points(name).some((point) => point[1] !== 0);
const parts = named("reward/").filter((name) => !["reward/mean", "reward/std", "reward/zero_std_groups"].includes(name) && (some(name) || !/_(errors|timeouts)$/.test(name)));
const before = data.before === null ? [] : [[0, data.before]];
section("Learning",
  has("reward/mean") ? null : chart("Loss of the texts", [line("train/loss", "blue", "learned from"), line("val/loss", "green", "held out")], { latest: true, note: "nats per token" }),
  chart("Reward of the rollouts", [line("reward/mean", "blue", "mean"), ...parts.filter((name) => parts.length > 1).map((name, i) => line(name, PALETTE[1 + (i % 7)], name.slice(7), { thin: true }))], { latest: true }),
  chart("On held-out prompts", [{ name: "accuracy", color: "green", points: [...before, ...points("val/accuracy")] },
    ...named("val/pass@").map((name, i) => line(name, PALETTE[3 + (i % 5)], name.slice(4), { thin: true }))], { latest: true, zero: true, show: percent, note: before.length ? "iteration 0 is before training" : "" }),
  chart("Groups whose answers all earn the same", [line("reward/zero_std_groups", "grey", "share of groups: they teach nothing")], { zero: true, top: 1, show: percent, latest: true, height: 130 }),
  chart("How far the policy moves", [["train/kl", "purple", "KL to the reference"], ["train/divergence", "orange", "divergence from the teacher"], ["train/approx_kl", "sky", "KL of an update"]].filter(([name]) => some(name)).map((one) => line(...one)), { zero: true, latest: true, height: 130 }),
  chart("Engine against trainer", [line("mismatch/kl", "grey", "KL of their log-probs: rounding, unless it grows")].filter(() => some("mismatch/kl")), { zero: true, latest: true, height: 130 }));

// Responses, time
section("Responses",
  chart("Length", [line("rollout/length_max", "orange", "longest"), line("rollout/length_p99", "yellow", "p99"), line("rollout/length_p90", "sky", "p90"), line("rollout/length_p50", "blue", "median")], { log: true, note: "tokens, log scale" }),
  chart("Cut off at the length limit", [line("rollout/truncated", "orange", "share of responses")], { zero: true, show: percent, latest: true }));
const STAGES = { sync: "purple", rollout: "blue", "idle, used": "green", idle: "grey", reward: "pink", logprobs: "yellow", update: "orange", drafter: "green", validate: "sky", checkpoint: "brown", other: "soft", writing: "blue", weights: "purple", waiting: "grey" };
const stages = [...Object.keys(STAGES), ...named("time/").map((name) => name.slice(5))].filter((name, i, all) => all.indexOf(name) === i && name !== "iteration" && has(`time/${name}`));
const stageColor = (name) => STAGES[name] || "soft";
const seconds = (name) => points(`time/${name}`).reduce((sum, point) => sum + point[1], 0), whole = stages.reduce((sum, name) => sum + seconds(name), 0);
section("Time",
  chart("Where the seconds went", stages.map((name) => line(`time/${name}`, stageColor(name), name, { value: percent(seconds(name) / whole) })), { stacked: true, show: duration, note: "of each iteration, and each stage's share of the run so far" }),
  chart("Speed", [line("rollout/tokens_per_s", "blue", "rollout, tokens written"), line("train/tokens_per_s", "orange", "update, tokens read")], { zero: true, latest: true, note: "per second of one rank" }),
  chart("Use of the GPU in the update", [line("train/mfu", "orange", "share of its peak in bfloat16")], { zero: true, show: percent, latest: true, height: 130 }),
  chart("Most memory held on the GPU", named("memory/peak_").map((name) => line(name, stageColor(name.slice(12)), name.slice(12))), { zero: true, latest: true, note: "GiB, in each stage" }));

// Schedule
section("Schedule",
  chart("Age of what is learned from", [line("schedule/age_max", "orange", "oldest token"), line("schedule/age", "blue", "mean")], { zero: true, latest: true, note: "iterations since a token was written" }),
  chart("Effective sample", [line("mismatch/effective_sample_size", "green", "share of the tokens")].filter(() => has("schedule/age")), { zero: true, top: 1, show: percent, latest: true, note: "as good as all of them, whose weights make up for their age" }),
  chart("Prompts that wait", [line("schedule/deferred", "purple", "after a rollout")], { zero: true, latest: true, height: 130 }),
  chart("Tokens thrown away", [line("schedule/tokens_thrown_away", "orange", "of prompts that are answered anew")].filter(() => some("schedule/tokens_thrown_away")), { zero: true, latest: true, height: 130 }));

// Speculation
const WHO = { learned: ["blue", "the head"], mixed: ["sky", "head and look-ups"], sibling: ["green", "a sibling"], earlier: ["yellow", "an earlier answer"], ngram: ["purple", "an own look-up"], off: ["grey", "off"] };
const published = points("drafter/published").filter((point) => point[1] > 0).map(([x], i) => [x, `v${metrics["drafter/version"]?.[iterations.indexOf(x)] ?? i + 1}`]);
const share = (name) => points("rollout/tokens").map(([x, tokens]) => [x, (metrics[name][iterations.indexOf(x)] || 0) / tokens]);
const kept = named("speculation/kept_").map((name) => name.slice(17));
const drafted = kept.map((who) => ({ name: (WHO[who] || [0, who])[1], color: (WHO[who] || ["soft"])[0], points: share(`speculation/kept_${who}`) }));
section("Speculation",
  chart("Tokens per request and speculative step", [line("speculation/acceptance_length", "orange", "in the engine"), line("drafter/acceptance_before", "sky", "held out, before training", { dots: true, hollow: true }), line("drafter/acceptance_after", "blue", "after", { dots: true })], { latest: true, marks: published, note: published.length ? "lines mark the drafter's publications" : "" }),
  chart("Tokens that a drafter proposed", drafted, { stacked: true, show: percent, latest: true, note: "share of all tokens written; the policy's own are the rest" }),
  chart("How often the head guesses the likeliest token", named("drafter/top1_pos_").map((name, i) => line(name, PALETTE[i % 8], `draft ${name.slice(17)}`)), { zero: true, show: percent, note: "on held-out text, by draft position" }),
  chart("Drift of the policy", [line("rollout/policy_drift", "green", "KL from the first policy")], { zero: true, latest: true }),
  chart("Engine steps without drafts", [line("speculation/off_share", "grey", "share of steps")], { zero: true, top: 1, show: percent, latest: true }));

// Inside a rollout
function inside(number) {
  const { timeline } = details[number], cards = [];
  const ranks = details[number].ranks.map((rank) => (Array.isArray(rank) ? rank : Object.entries(rank))); // objects until 2026-11
  if (timeline) {
    const width = timeline.seconds / timeline.waiting.length, at = (values) => values.map((y, i) => [(i + 0.5) * width, y]);
    const order = Object.keys(WHO).filter((who) => timeline.running[who]);
    cards.push(chart("Requests running", [...order.map((who) => ({ name: WHO[who][1], color: WHO[who][0], points: at(timeline.running[who]) })),
      ...(Math.max(...timeline.waiting) > 0 ? [{ name: "waiting", color: "soft", points: at(timeline.waiting), line: true, dashed: true, thin: true }] : [])], { stacked: true, bar: width, wide: true, height: 210, note: "over the seconds of the rollout, tinted by who drafts for them" }));
    cards.push(chart("Draft length, and what a step brings", [{ name: "tokens drafted", color: "blue", points: at(timeline.k), thin: true }, { name: "tokens per request and engine step", color: "orange", points: at(timeline.tokens), thin: true }], { bar: width, zero: true, wide: true, height: 140 }));
  }
  if (ranks.length) {
    const beside = Object.entries(details[number].engines || {}), bars = [...ranks.map((rank, i) => [`rank ${i}`, rank]), ...beside];
    const spent = (rank, name) => rank.reduce((sum, [stage, value]) => sum + (!name || stage === name ? value : 0), 0);
    const longest = Math.max(...bars.map(([, rank]) => spent(rank)));
    const used = [...new Set([...stages, "idle, used", "writing", "weights", "waiting"])].filter((name) => bars.some(([, rank]) => spent(rank, name) > 0));
    const order = Object.keys(STAGES).filter((name) => used.includes(name)).concat(used.filter((name) => !(name in STAGES)));
    cards.push(h("div", { class: "card wide" }, h("h3", {}, beside.length ? "Seconds of each rank and engine" : ranks.length > 1 ? "Seconds of each rank" : "Seconds of the iteration"),
      h("div", { class: "soft" }, `from the iteration's first second to its last, after ${duration(longest)}`),
      h("div", { class: "legend" }, ...order.map((name) => h("span", {}, key(stageColor(name)), name, bars.length > 1 ? null : h("b", {}, ` ${duration(spent(ranks[0], name))}`)))),
      ...bars.map(([who, rank]) => h("div", { class: "rank" }, bars.length > 1 ? h("span", {}, who) : null,
        h("div", { class: "bar" }, ...rank.map(([name, value]) => h("i", { title: `${name}: ${duration(value)}`, style: { background: color(stageColor(name)), width: `${(100 * value) / longest}%` } })))))));
  }
  return cards;
}
const known = Object.keys(details).map(Number);
const pick = (label, values, onchange) => h("select", { "aria-label": label, onchange }, ...values.map(([value, text]) => h("option", { value }, text)));
if (known.some((number) => details[number].timeline || details[number].ranks.length)) {
  const body = h("div", { class: "grid" });
  const chosen = pick("iteration", known.map((number) => [number, `iteration ${number}`]), () => body.replaceChildren(...inside(chosen.value)));
  chosen.value = known.at(-1);
  body.append(...inside(known.at(-1)));
  main.append(h("h2", {}, "Inside an iteration"), h("div", { class: "tools" }, chosen, h("span", { class: "soft" }, "rollout of the first rank")), body);
}

// Completions
const all = known.flatMap((number) => details[number].completions.map((one) => ({ ...one, iteration: number })));
if (all.length) {
  const list = h("div", { class: "card list" }), pane = h("article", { class: "card", "aria-live": "polite" });
  let shown = [], current = 0;
  const orders = { newest: (a, b) => b.iteration - a.iteration || b.reward - a.reward, best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward, longest: (a, b) => b.tokens - a.tokens };
  const plain = (one) => one.pieces.map((piece) => (piece[0] === "…" ? " … " : piece[1])).join("");
  const span = ([who, text]) => {
    if (!who) return text;
    if (who === "…") return h("span", { class: "gap" }, ` … ${text} … `);
    if (who === "environment") return h("details", { class: "said", ...(text.length < 200 ? { open: "" } : {}) }, h("summary", {}, "environment"), text);
    const refused = who[0] === "-", [tint, name] = WHO[refused ? who.slice(1) : who] || ["soft", who];
    return h("span", { class: refused ? "refused" : "kept", style: { "--who": color(tint) }, title: refused ? `the policy's own: a draft by ${name} was refused here` : `drafted by ${name}, and kept` }, text);
  };
  function open(i, scrolls) {
    current = Math.max(0, Math.min(i, shown.length - 1));
    const one = shown[current];
    [...list.children].forEach((button, n) => button.setAttribute("aria-current", n === current));
    if (scrolls) list.children[current].scrollIntoView({ block: "nearest" });
    const score = (name, value) => h("span", {}, h("span", { class: "soft" }, `${name} `), h("b", {}, value));
    const tokens = Object.values(one.kept).reduce((a, b) => a + b, 0);
    pane.replaceChildren(h("div", { class: "scores" }, score("reward", format(one.reward)),
      ...Object.entries(one.rewards).filter(() => Object.keys(one.rewards).length > 1).map(([name, value]) => score(name, format(value))),
      score("tokens", format(one.tokens) + (one.cut ? ", cut off" : "")), tokens ? score("drafted", percent(tokens / one.tokens)) : null,
      one.answer === null ? null : score("answer", one.answer), score("iteration", one.iteration)),
      h("pre", { class: "prompt" }, one.prompt), h("pre", { class: "text" }, ...one.pieces.map(span)));
  }
  function fill() {
    shown = all.filter((one) => chosen.value === "all" || one.iteration === Number(chosen.value)).sort(orders[order.value]);
    list.replaceChildren(...shown.map((one, i) => h("button", { onclick: () => open(i) }, h("b", {}, format(one.reward)), h("span", {}, `${format(one.tokens)} tokens · it. ${one.iteration}`), h("p", {}, plain(one).slice(0, 120)))));
    list.scrollTop = 0;
    open(0);
  }
  const chosen = pick("iteration of the completions", [["all", "all iterations"], ...known.filter((number) => details[number].completions.length).map((number) => [number, `iteration ${number}`])], fill);
  const order = pick("order", [["newest", "newest first"], ["best", "best reward first"], ["worst", "worst reward first"], ["longest", "longest first"]], fill);
  const drafters = Object.keys(WHO).filter((who) => all.some((one) => one.kept[who]));
  main.append(h("h2", {}, "Completions"), h("div", { class: "tools" }, chosen, order, h("button", { onclick: () => open(current - 1, true), "aria-label": "previous" }, "‹"), h("button", { onclick: () => open(current + 1, true), "aria-label": "next" }, "›")),
    drafters.length ? h("div", { class: "legend" }, ...drafters.map((who) => h("span", {}, h("span", { class: "kept", style: { "--who": color(WHO[who][0]) } }, ` drafted by ${WHO[who][1]}, kept `))),
      h("span", {}, h("span", { class: "refused", style: { "--who": color("soft") } }, "the policy's own, where a draft was refused")), h("span", {}, "no tint: the policy's own")) : h("span"),
    h("div", { class: "reader" }, list, pane));
  fill();
}

// Everything else
const names = Object.keys(metrics).filter(has);
const any = h("div", { class: "grid" }), metric = pick("metric", names.map((name) => [name, name]), () => any.replaceChildren(chart(metric.value, [line(metric.value, "blue")], { wide: true, latest: true })));
metric.value = names.includes("train/loss") ? "train/loss" : names[0];
any.append(chart(metric.value, [line(metric.value, "blue")], { wide: true, latest: true }));
main.append(h("h2", {}, "Any metric"), h("div", { class: "tools" }, metric), any, h("h2", {}, "The run"),
  h("div", { class: "card" }, h("dl", {}, ...Object.entries(data.facts || {}).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    data.config ? h("details", {}, h("summary", {}, "configuration"), h("pre", {}, data.config)) : null));
document.body.append(tip);
for (const svg of document.querySelectorAll("main svg")) svg.draw(); // at once: who prints or stores the page need not wait for the observer
