// The page: takes a picture or a text, asks the server, and shows what it says.

import { askForKey, get, needsKey, post, reach } from "/page/api.js";
import { drawOn, element, rowsOf, show } from "/page/answer.js";
import { BY_CLASS, Look, MEANINGS, NAMES } from "/page/look.js";
import { rgb } from "/page/maps.js";
import { share } from "/page/share.js";

const SAMPLES = ["window.png", "hills.png", "digit.png", "scene.png"];
const LARGEST = 1600, MOST_CLASSES = 2000, PAUSE = 150, $ = id => document.getElementById(id);
const canvas = $("canvas"), pen = canvas.getContext("2d");
let models = [], index = null, indexed = null, colours, timer = null, clock = null, asking = null, wanting = null;
const waits = [];  // the newest last
// `item` is the file or text, `bitmap` the picture, `looks` what was explained, by method, `view` what is on the stage,
// `liked` what was last chosen for it by hand.
const state = { item: null, bitmap: null, answer: null, looks: {}, view: "picture", liked: null };
const model = () => models.find(m => m.name === $("model").value);
const look = () => state.looks[state.view];

function fail(error) {
  if (error.name === "AbortError") return;
  $("error").textContent = error.message;
  $("error").hidden = false;
  $("error").scrollIntoView({ block: "nearest" });
}

// Tell what is waited for, until it is there.
async function waiting(words, promise) {
  const wait = { words, began: performance.now() };
  waits.push(wait);
  tellWait();
  try {
    return await promise;
  } finally {
    waits.splice(waits.indexOf(wait), 1);
    tellWait();
  }
}
function tellWait() {
  const newest = waits.at(-1);
  clearTimeout(clock);
  $("busy").hidden = !newest;
  $("stage").ariaBusy = Boolean(newest);
  if (!newest) return;
  const seconds = Math.round((performance.now() - newest.began) / 1000);
  if ($("busyWords").textContent !== newest.words) $("busyWords").textContent = newest.words;
  $("busySeconds").textContent = seconds ? `${seconds} s` : "";
  clock = setTimeout(tellWait, 1000);
}

// ---- taking ----

function clear() {
  asking?.abort();
  stop();
  Object.assign(state, { answer: null, looks: {}, view: "picture" });
  for (const id of ["error", "lookCard", "controls", "similarCard", "share", "views"]) $(id).hidden = true;
  $("timing").textContent = "";
  $("answer").ariaBusy = false;
}

async function take(item) {
  if (!item) return;
  clear();
  const signal = (asking = new AbortController()).signal, began = performance.now();
  if (!models.length) await begin();
  const m = model();
  if (!m || signal.aborted) return;
  Object.assign(state, { item, bitmap: null });
  if (m.reads === "image") {
    const bitmap = await createImageBitmap(item).catch(() => null);  // a browser may not know what the server knows
    if (signal.aborted) return;
    state.bitmap = bitmap;
    draw();
  }
  try {
    if (headless(m)) $("answer").replaceChildren(element("p", { className: "soft" }, about(m)));
    else await waiting("Asking the model", predict(m, item, began, signal));
    if (m.reads === "image") {
      offerViews(m);
      await choose(firstView(m));
      if (headless(m) && look()) tellTime(look().timing, began);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    $("answer").replaceChildren(element("p", { className: "soft" }, "There is no answer."));
    return fail(new Error(error.message.replace(/^image\b/, item.name ?? "image")));  // the server has no name for it
  }
  if (index && indexed === m.reads) {
    const found = post("/v1/search", item, { top_k: 8, thumbnails: true }, signal);
    await waiting("Searching the index", found).then(showSimilar, fail);
  }
}

// What was chosen stays chosen for the next picture and the next model, if that can be explained so.
function firstView(m) {
  const usual = ["detect", "segment"].includes(m.task) ? [] : headless(m) ? ["attention", "tokens"] : ["attention"];
  return [state.liked, ...usual].find(view => view === "picture" || m.explains.includes(view)) ?? "picture";
}

async function predict(m, item, began, signal) {
  $("answer").ariaBusy = true;
  try {
    state.answer = await post("/v1/predict", item, { model: m.name }, signal);
  } finally {
    if (!signal.aborted) $("answer").ariaBusy = false;
  }
  $("answer").replaceChildren(...show(state.answer, m.labels, colours));
  tellTime(state.answer.timing, began);
}
function tellTime({ read_ms, wait_ms, run_ms, batch }, began) {
  const all = performance.now() - began, more = batch > 1 ? `, ${batch} at once` : "";
  $("timing").textContent = `${time(all)}: reading ${time(read_ms)}, waiting ${time(wait_ms)}, model ${time(run_ms)}${more}`;
}
const time = ms => ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)}\u00a0ms` : `${(ms / 1000).toFixed(1)}\u00a0s`;

function showSimilar({ matches }) {
  $("similar").replaceChildren(...matches.map(({ name, score, thumbnail }) => {
    const crisp = event => event.target.classList.toggle("small", event.target.naturalWidth < 64);
    const picture = thumbnail ? element("img", { onload: crisp, src: `data:image/jpeg;base64,${thumbnail}`, alt: "" }) : element("div", { className: "none" });
    return element("li", {}, picture, element("p", {}, name), element("p", { className: "soft" }, score.toFixed(3)));
  }));
  $("similarNote").textContent = `The nearest of ${index} in the index, to the model that it was made with; 1 is the same.`;
  $("similarCard").hidden = !matches.length;
}

// ---- the stage ----

function offerViews(m) {
  const views = ["picture", ...Object.keys(NAMES).filter(name => m.explains.includes(name))];
  $("views").replaceChildren(...views.map(name => element("label", {},
    element("input", { type: "radio", name: "view", value: name, onchange: () => choose(state.liked = name) }), NAMES[name])));
  $("views").hidden = views.length < 2;
  $("share").hidden = false;
}

// Who wants another view, block, patch or class no longer wants the last.
function want() {
  wanting?.abort();
  wanting = new AbortController();
  return AbortSignal.any([asking.signal, wanting.signal]);
}

async function choose(view) {
  const signal = want();
  if (view !== "picture" && !state.looks[view]) {
    const m = model(), several = m.task === "regress" && m.labels.length > 1;  // of numbers none is the likeliest
    await explain(view, BY_CLASS.includes(view) && several ? { class: m.labels[0] } : {}, signal);
    if (signal.aborted) return;
    if (!state.looks[view]) view = state.view;
  }
  turn(view);
}

// What the server makes of a view, kept if it could be made and is still wanted.
async function explain(view, fields, signal, pause = 0) {
  const ask = async m => {
    if (pause) await new Promise(done => setTimeout(done, pause));
    signal.throwIfAborted();
    return Look.from(await post("/v1/explain", state.item, { model: m.name, method: view, rows: true, ...fields }, signal), m, state.bitmap);
  };
  $("error").hidden = true;
  try {
    const made = await waiting(`Computing: ${NAMES[view]}`, ask(model()));
    if (!signal.aborted) state.looks[view] = made;
  } catch (error) {
    fail(error);
  }
}

// The same view of another block, patch or class, which only the server can tell; of several keys in a row the last counts.
async function again(fields) {
  const view = state.view, before = look(), signal = want();
  await explain(view, fields, signal, PAUSE);
  if (signal.aborted) return;
  const map = before.map < look().titles.length ? before.map : 0, at = before.at === look().told.query ? -1 : before.at;
  Object.assign(look(), { map, at });
  turn(view);
}
function lookFrom(values) {
  const l = look();
  change(values);
  if (!l.live) again({ layer: l.layer, patch: l.query < 0 ? null : l.pixel(l.query).join(",") });
}

function turn(view) {
  stop();
  state.view = view;
  for (const radio of $("views").querySelectorAll("input")) radio.checked = radio.value === view;
  const l = look();
  $("lookCard").hidden = $("controls").hidden = !l;
  if (l) {
    l.settle();
    const { labels } = model(), several = !l.live && view !== "tokens" && l.titles.length > 1;
    $("layer").max = l.layers - 1;
    $("attention").hidden = $("asks").hidden = !l.attends;
    $("headLabel").hidden = $("play").hidden = !l.live;
    if (l.live) [$("head").min, $("head").max] = [l.packed.heads.length > 1 ? -1 : 0, l.weights.kept - 1];
    $("cls").hidden = l.live && !l.cls;
    $("cls").textContent = l.cls ? "Ask [CLS]" : "Ask all patches";
    $("classLabel").hidden = !BY_CLASS.includes(view) || labels.length < 2 || labels.length > MOST_CLASSES;
    $("classWord").textContent = model().task === "regress" ? "Number" : "Class";
    if (!$("classLabel").hidden) $("class").replaceChildren(...labels.map(name => element("option", { textContent: name, selected: name === l.target })));
    $("mapLabel").hidden = !several;
    $("mapWord").textContent = { attention: "Head", writing: "Token" }[view] ?? "Map";
    if (several) $("map").replaceChildren(...l.titles.map((title, i) => element("option", { value: i, textContent: title, selected: i === l.map })));
    const hint = l.live || !l.attends ? "" : "Ask any patch where it looks: tap it, or go there with the arrow keys and press Enter.";
    const notes = [hint, MEANINGS[view], l.attends ? "" : `${l.about}.`, `Input of the model, in pixels: ${l.part}${l.part.includes("squeezed") ? "" : `, at ${l.picture.width} x ${l.picture.height}`}.`, l.packed?.note, `Computed in ${time(l.timing.run_ms)}.`];
    $("lookNote").textContent = notes.filter(Boolean).map(note => note[0].toUpperCase() + note.slice(1)).join(" ");
  }
  draw();
}

// Pixels of the canvas for each pixel of an image.
function zoomOf({ width, height }) {
  const longest = Math.max(width, height);
  return longest > LARGEST ? LARGEST / longest : Math.max(1, Math.ceil(640 / longest));
}

function draw() {
  const l = look();
  $("empty").hidden = !(canvas.hidden = !l && !state.bitmap);
  $("frame").hidden = $("asked").hidden = true;
  if (canvas.hidden) return;
  const { width, height } = l ?? state.bitmap, longest = Math.max(width, height), scale = zoomOf(l ?? state.bitmap);
  const size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  canvas.classList.toggle("small", longest < 200);
  canvas.classList.toggle("look", Boolean(l));
  if (l) {
    drawLook(l);
  } else {
    pen.imageSmoothingEnabled = longest >= 200;
    pen.fillStyle = "#fff";  // what is transparent lies on white, for the model too
    pen.fillRect(0, 0, ...size);
    pen.drawImage(state.bitmap, 0, 0, ...size);
    drawOn(pen, state.answer, model().labels, colours, scale);
  }
  const told = state.answer ? rowsOf(state.answer, model().labels, colours).slice(0, 3).map(r => `${r.name} ${r.value}`).join(", ") : "no answer";
  $("stage").ariaLabel = `${NAMES[state.view]}: ${told}` + (l ? ". Arrow keys move the patch." : "");
}

function drawLook(l) {
  const strength = +$("strength").value, shown = l.draw(pen, zoomOf(l), strength / 100, $("style").value, colours.maps);
  frame($("frame"), l, l.frame);
  frame($("asked"), l, l.asked);
  $("say").textContent = shown.say;
  $("legend").hidden = !shown.ends;
  if (shown.ends) {
    [$("least").textContent, $("most").textContent] = shown.ends;
    const brush = $("strip").getContext("2d"), table = shown.signed ? colours.maps : colours.maps.slice(colours.maps.length / 2);
    for (let i = 0; i < 256; i++) {
      brush.fillStyle = rgb(table[Math.floor(i * table.length / 256)]);
      brush.fillRect(i, 0, 1, 1);
    }
  }
  $("layer").value = l.layer; $("layerSays").textContent = l.layer;
  if (l.live) {
    $("head").value = l.head;
    $("headSays").textContent = l.head < 0 ? "mean" : l.packed.heads[l.head] ?? "mean";
  }
  $("strengthSays").textContent = `${strength} %`;
  $("play").textContent = timer ? "Stop" : "Play blocks";
}

function frame(box, l, patch) {
  box.hidden = patch < 0;
  if (box.hidden) return;
  const inner = canvas.getBoundingClientRect(), outer = $("stage").getBoundingClientRect();
  const { x, y, w, h } = l.gridAt(inner.width / l.width).box(patch), left = inner.left - outer.left + x, top = inner.top - outer.top + y;
  Object.assign(box.style, { width: `${w}px`, height: `${h}px`, left: `${left}px`, top: `${top}px` });
}

function change(values) {
  if (!look()) return;
  Object.assign(look(), values);
  draw();
}
function point(event) {
  const l = look(), box = canvas.getBoundingClientRect();
  if (!l) return;
  const patch = l.gridAt(box.width / l.width).at(event.clientX - box.left, event.clientY - box.top);
  if (patch < 0) return;
  l.choose(patch);
  draw();
  if (event.type === "click" && l.attends && !l.live) lookFrom({ query: l.at });
}
function stop() { clearInterval(timer); timer = null; }
function play() {
  if (timer) stop();
  else {
    timer = setInterval(() => change({ layer: (look().layer + 1) % look().layers }), 700);
    $("stage").scrollIntoView({ block: "nearest" });
  }
  draw();
}
const toLayer = layer => { if (layer !== look().layer) lookFrom({ layer }); };
const step = by => toLayer(Math.min(look().layers - 1, Math.max(0, look().layer + by)));
const askAll = () => lookFrom({ query: -1, at: -1 });
const nextHead = () => change({ head: look().head + 1 > +$("head").max ? +$("head").min : look().head + 1 });

$("stage").addEventListener("keydown", event => {
  const l = look(), moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!l || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in moves) {
    const q = l.frame < 0 ? l.middle : l.frame, [dr, dc] = moves[event.key], r = Math.floor(q / l.columns) + dr, c = q % l.columns + dc;
    if (r >= 0 && c >= 0 && r < l.rows && c < l.columns) { l.choose(r * l.columns + c); draw(); }
  } else if (event.key === "s") {
    $("style").value = $("style").value === "smooth" ? "patches" : "smooth";
    draw();
  } else if (!l.attends) return;
  else if (event.key === "[") step(-1); else if (event.key === "]") step(1);
  else if (event.key === "c" && !$("cls").hidden) askAll();
  else if (event.key === "h" && l.live) nextHead(); else if (event.key === " " && l.live) play();
  else if (event.key === "Enter" && !l.live && l.at >= 0) lookFrom({ query: l.at });
  else return;
  event.preventDefault();
});
for (const kind of ["pointermove", "pointerdown", "click"]) canvas.addEventListener(kind, point);
$("layer").addEventListener("input", e => { if (look()?.live) toLayer(+e.target.value); else $("layerSays").textContent = e.target.value; });
$("layer").addEventListener("change", e => toLayer(+e.target.value));
$("class").addEventListener("change", e => again({ class: e.target.value }));
$("head").addEventListener("input", e => change({ head: +e.target.value }));
$("map").addEventListener("change", e => change({ map: +e.target.value }));
$("strength").addEventListener("input", draw);
$("style").addEventListener("change", draw);
$("play").addEventListener("click", play);
$("cls").addEventListener("click", askAll);
addEventListener("resize", draw);

// ---- ways in ----

$("stage").addEventListener("click", () => { if (!$("empty").hidden) $("file").click(); });
for (const id of ["file", "camera"]) $(id).addEventListener("change", e => { take(e.target.files[0]); e.target.value = ""; });
for (const kind of ["dragenter", "dragover"]) addEventListener(kind, e => { e.preventDefault(); $("stage").classList.add("over"); });
for (const kind of ["dragleave", "drop"]) addEventListener(kind, e => { e.preventDefault(); $("stage").classList.remove("over"); });
addEventListener("drop", e => { if (model()?.reads !== "text") take(e.dataTransfer.files[0]); });
addEventListener("paste", e => { if (model()?.reads !== "text") take(e.clipboardData.files[0]); });
$("texts").addEventListener("submit", e => {
  e.preventDefault();
  if ($("text").value.trim()) take($("text").value); else fail(new Error("There is no text yet; write one."));
});
$("text").addEventListener("keydown", e => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) $("texts").requestSubmit(); });
$("model").addEventListener("change", () => {
  clear();
  suit();
  const item = model().reads === "text" ? $("text").value.trim() : typeof state.item === "string" ? null : state.item;
  if (item) take(item); else draw();
});
$("key").addEventListener("click", async () => { if (await askForKey("The key of this server") && !models.length) begin(); });
$("share").addEventListener("click", () => {
  const l = look(), of = l?.attends && [`block ${l.shown.layer}`, l.headName, l.shown.query < 0 ? "" : `asked: ${l.place(l.shown.query)}`];
  const caption = [NAMES[state.view], ...of || []].filter(Boolean).join(", ");
  share(canvas, `${model().name} · vitral`, state.answer ? rowsOf(state.answer, model().labels, colours) : [], caption);
});

async function sample(name) {
  try {
    take(await (await reach(`/page/samples/${name}`)).blob());
  } catch (error) {
    fail(error);
  }
}
function suit() {
  const text = model().reads === "text";
  $("images").hidden = text;
  $("texts").hidden = !text;
  $("answer").replaceChildren(element("p", { className: "soft" }, about(model())));
  document.title = `${model().name} · vitral`;
}
const headless = m => m.task === "classify" && !m.labels.length;
function about(m) {
  if (headless(m)) return "This model has learned no classes: see what it looks at.";
  const { task, labels, size } = m;
  const some = labels.slice(0, 12).join(", ") + (labels.length > 12 ? ", …" : ""), n = labels.length;
  const does = { classify: `Tells ${n} classes apart: ${some}.`, multilabel: `Finds which of ${n} labels fit: ${some}.`,
    segment: `Gives every pixel one of ${n} classes: ${some}.`, detect: `Finds objects of ${n} classes: ${some}.`,
    regress: `Tells ${some}.`, tag: `Tags the words of a text: ${some}.`, caption: "Writes what it sees.",
    translate: "Translates a text.", complete: "Goes on with a text." }[task];
  return does + (size ? ` It sees pictures as ${size[1]} x ${size[0]} pixels.` : "");
}

async function begin() {
  $("error").hidden = true;
  try {
    const [facts, palette] = await Promise.all([get("/v1/models"), get("/page/colours.json")]);
    ({ models, index, index_reads: indexed } = facts);
    colours = palette;
    $("style").value = colours.style;
    $("version").textContent = `vitral ${facts.version}`;
    $("model").replaceChildren(...models.map(m => element("option", { value: m.name, textContent: m.name })));
    $("samples").replaceChildren(...SAMPLES.map(name => element("button", { type: "button", title: name.split(".")[0], onclick: () => sample(name) },
      element("img", { src: `/page/samples/${name}`, alt: `Sample: ${name.split(".")[0]}` }))));
    suit();
  } catch (error) {
    fail(error);
  }
  $("key").hidden = !needsKey();
}
begin();
