// Answers of every task: in words and bars beside the picture, and as boxes or masks on it.

import { digits, rgb } from "/page/maps.js";

export function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}
const MOST_BARS = 12, percent = p => (100 * p).toFixed(p > 0.9995 || p < 0.0005 ? 2 : 1) + " %";

function bars(rows) {
  return element("ul", { className: "bars" }, ...rows.map(({ name, value, share, colour }) => {
    const fill = element("div", { className: colour === null ? "fill plain" : "fill" }), label = element("span", {}, name);
    fill.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
    if (colour) {
      fill.style.background = rgb(colour);
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = rgb(colour);
      label.prepend(swatch);
    }
    return element("li", {}, element("div", { className: "name" }, label, element("span", {}, value)),
      element("div", { className: "track", ariaHidden: "true" }, fill));
  }));
}

function barsOrSome(rows) {
  const rest = rows.slice(MOST_BARS);
  return [bars(rows.slice(0, MOST_BARS)), ...rest.length ? [element("details", {}, element("summary", { className: "soft" }, `${rest.length} more`), bars(rest))] : []];
}

// The rows of an answer; `colour` is null where what others have a colour for has none. Also what is written on a shared picture.
export function rowsOf(answer, labels, colours) {
  const of = name => colours.classes[Math.max(0, labels.indexOf(name)) % 256];
  switch (answer.task) {
    case "classify": return answer.predictions.map(p => ({ name: p.label, value: percent(p.probability), share: p.probability }));
    case "multilabel": return Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]).slice(0, 10)
      .map(([name, p]) => ({ name: answer.labels.includes(name) ? `${name} ✓` : name, value: percent(p), share: p }));
    case "detect": return answer.objects.map(o => ({ name: o.label, value: percent(o.score), share: o.score, colour: of(o.label) }));
    case "segment": return [...answer.classes].sort((a, b) => b.share - a.share).map(c => {
      const number = labels.indexOf(c.label);
      return { name: c.label, value: percent(c.share), share: c.share, colour: number > 0 ? colours.classes[(number - 1) % 256] : null };
    });
    case "regress": return Object.entries(answer.values).map(([name, v]) => ({ name, share: null,
      value: digits(v) + (answer.deviations ? ` ± ${digits(answer.deviations[name])}` : "") }));
    case "tag": return answer.words.map(w => ({ name: w.word, value: `${w.tag} ${percent(w.probability)}`, share: w.probability }));
    default: return answer.texts.map(t => ({ name: t.text, value: "", share: null }));
  }
}

export function show(answer, labels, colours) {
  const rows = rowsOf(answer, labels, colours), shown = [];
  if (answer.task === "regress") {
    for (const row of rows) shown.push(element("p", { className: "number" }, row.value), element("p", { className: "soft" }, row.name));
  } else if (answer.task === "tag") {
    shown.push(element("div", { className: "words" }, ...answer.words.map(w => element("span", { title: percent(w.probability) }, w.word, element("b", {}, w.tag)))));
  } else if (answer.texts) {
    for (const row of rows) shown.push(element("p", { className: "written" }, row.name || "(nothing)"));
  } else if (!rows.length) shown.push(element("p", {}, "Nothing was found."));
  else shown.push(...barsOrSome(rows));
  if (answer.task === "multilabel" && !answer.labels.length) shown.unshift(element("p", { className: "soft" }, "No label is above its threshold."));
  if (answer.note) shown.push(element("p", { className: "soft" }, answer.note));
  return shown;
}

const masks = new WeakMap();  // of each answer, painted once

// Boxes and masks, on a canvas that has the whole picture at `scale`.
export function drawOn(pen, answer, labels, colours, scale) {
  if (answer?.task === "detect") drawBoxes(pen, answer, labels, colours, scale);
  if (answer?.task === "segment") {
    if (!masks.has(answer)) masks.set(answer, paintMask(answer, labels, colours, pen.canvas));
    pen.drawImage(masks.get(answer), 0, 0);
  }
}

function drawBoxes(pen, answer, labels, colours, scale) {
  const { width, height, clientWidth } = pen.canvas, dot = width / (clientWidth || width), size = Math.round(13 * dot);  // on the screen
  pen.font = `600 ${size}px system-ui, sans-serif`;
  pen.textBaseline = "top";
  const inkOf = label => colours.classes[Math.max(0, labels.indexOf(label)) % 256];
  for (const { label, box } of [...answer.objects].reverse()) {  // the best is drawn last
    const [x0, y0, x1, y1] = box.map(v => v * scale);
    pen.lineWidth = 2 * dot;
    pen.strokeStyle = rgb(inkOf(label));
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  }
  for (const { label, score, box } of [...answer.objects].reverse()) {  // no line goes through a name
    const [x0, y0, , y1] = box.map(v => v * scale), ink = inkOf(label);
    pen.fillStyle = rgb(ink);
    const text = `${label} ${Math.round(100 * score)} %`, w = pen.measureText(text).width + 8 * dot, h = size + 6 * dot;
    const x = Math.min(Math.max(0, x0), width - w), y = y0 >= h ? y0 - h : Math.min(y1, height - h);
    pen.fillRect(x, y, w, h);
    pen.fillStyle = ink[0] + ink[1] + ink[2] > 330 ? "#000" : "#fff";
    pen.fillText(text, x + 4 * dot, y + 4 * dot);
  }
}

// The number of each pixel's class, column after column, in a picture that is brought to w x h, no larger than it is.
function numbersOf({ size: [H, W], classes }, labels, w, h) {
  const numbers = new Int16Array(w * h), before = (n, small, large) => Math.ceil(n * small / large - 0.5);
  const at = i => {  // how many of the pixels that are kept come before pixel i
    const column = Math.floor(i / H), x = before(column, w, W), kept = Math.floor((x + 0.5) * W / w) === column;
    return x * h + (kept ? before(i % H, h, H) : 0);
  };
  for (const { label, rle } of classes) {
    let end = 0;
    rle.counts.forEach((count, i) => {  // zeros and ones in turn, down the columns
      if (i % 2) numbers.fill(labels.indexOf(label), at(end), at(end + count));
      end += count;
    });
  }
  return numbers;
}

// Masks as a layer of the canvas's size, with lines between classes.
function paintMask(answer, labels, colours, { width, height }) {
  const [H, W] = answer.size, w = Math.min(W, width), h = Math.min(H, height), numbers = numbersOf(answer, labels, w, h);
  const layer = new OffscreenCanvas(width, height), brush = layer.getContext("2d"), pixels = brush.createImageData(width, height);
  const inks = new Uint32Array(new Uint8Array(labels.flatMap((_, n) => n ? [...colours.classes[(n - 1) % 256], 128] : [0, 0, 0, 0])).buffer);
  const ink = new Uint32Array(pixels.data.buffer), line = Math.max(1, Math.round(Math.max(width, height) / 400));
  const rows = Int32Array.from({ length: height }, (_, y) => Math.floor((y + 0.5) * h / height));
  const columns = Int32Array.from({ length: width }, (_, x) => Math.floor((x + 0.5) * w / width) * h);
  for (let y = 0; y < height; y++) {
    const row = rows[y], above = rows[Math.max(0, y - line)];
    for (let x = 0; x < width; x++) {
      const column = columns[x], n = numbers[column + row];
      const edge = n !== numbers[column + above] || n !== numbers[columns[Math.max(0, x - line)] + row];
      ink[y * width + x] = edge ? 0xffffffff : inks[n];
    }
  }
  brush.putImageData(pixels, 0, 0);
  return layer;
}
