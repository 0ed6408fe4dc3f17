// Maps over patches in pages: numbers, colours by the rule of colours.py, placement as in placement.py, and attention rows as
// page.py packs them.

export const digits = v => v !== 0 && (Math.abs(v) < 1e-4 || Math.abs(v) >= 1e6) ?
  v.toExponential(1).replace("+", "") : String(+v.toPrecision(3));
export const percent = v => digits(100 * v) + " %";
export const rgb = c => `rgb(${c.join(",")})`;

// From zero to the largest value; a few outliers are cut off unless they hold half of the total.
export function scaleOf(values) {
  const sizes = Float64Array.from(values, Math.abs).sort().reverse(), add = (a, b) => a + b;
  const few = Math.floor(sizes.length / 200 + 0.5);
  const cut = sizes[0] > 2 * sizes[few] && sizes.slice(0, few).reduce(add, 0) < 0.5 * sizes.reduce(add, 0);
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  return { low, high, top: (cut ? sizes[few] : sizes[0]) || 1, cut: cut ? few : 0 };
}

// The colour of each value, from a table that ranges from the most negative value to the most positive.
export function painted(values, top, table) {
  const zero = table.length / 2;
  return Array.from(values, v => {
    const step = Math.round(Math.min(1, Math.abs(v) / top) * (zero - 1));
    return table[v < 0 ? zero - 1 - step : zero + step];
  });
}

// Values between the centres of patches, `times` as many along each side: bilinear, constant beyond the outer centres.
export function refined(values, rows, columns, times) {
  const places = (count) => Array.from({ length: count * times }, (_, i) => {
    const at = Math.min(count - 1, Math.max(0, (i + 0.5) / times - 0.5)), low = Math.min(count - 1, Math.floor(at));
    return [low, Math.min(count - 1, low + 1), at - low];
  });
  const across = places(columns), fine = [];
  for (const [top, bottom, down] of places(rows)) {
    for (const [left, right, over] of across) {
      const above = values[top * columns + left] * (1 - over) + values[top * columns + right] * over;
      const below = values[bottom * columns + left] * (1 - over) + values[bottom * columns + right] * over;
      fine.push(above * (1 - down) + below * down);
    }
  }
  return fine;
}

// The first pixel whose centre is not before an edge.
const firstPixel = edge => Math.ceil(edge - 0.5);

// A grid of patches on a canvas: `crop` is [left, top, right, bottom] and `cell` [height, width] in pixels of the original,
// which is drawn `scale` times as large.
export class Place {
  constructor(crop, cell, [rows, columns], scale) {
    [this.left, this.top, this.right, this.bottom] = crop.map(edge => edge * scale);
    [this.height, this.width] = cell.map(side => side * scale);
    Object.assign(this, { rows, columns });
  }
  // A cell that extends beyond the crop ends with it.
  x(column) { return Math.min(this.right, this.left + column * this.width); }
  y(row) { return Math.min(this.bottom, this.top + row * this.height); }
  box(i) {
    const row = Math.floor(i / this.columns), column = i % this.columns, x = this.x(column), y = this.y(row);
    return { x, y, w: this.x(column + 1) - x, h: this.y(row + 1) - y };
  }
  // The patch at a point, -1 outside of the crop.
  at(x, y) {
    if (x < this.left || y < this.top || x >= this.right || y >= this.bottom) return -1;
    const row = Math.floor((y - this.top) / this.height), column = Math.floor((x - this.left) / this.width);
    return Math.min(this.rows - 1, row) * this.columns + Math.min(this.columns - 1, column);
  }

  // Draw a map whose cells have the colours `paint(planes)`: a plane has one value for each patch.
  draw(pen, planes, paint, style, strength) {
    pen.globalAlpha = strength;
    if (style === "smooth") this.drawSmooth(pen, planes, paint);
    else paint(planes).forEach((colour, i) => {
      const { x, y, w, h } = this.box(i), left = firstPixel(x), top = firstPixel(y);
      pen.fillStyle = rgb(colour);
      pen.fillRect(left, top, firstPixel(x + w) - left, firstPixel(y + h) - top);
    });
    pen.globalAlpha = 1;
  }
  drawSmooth(pen, planes, paint) {
    const { rows, columns, left, top } = this, times = Math.max(4, Math.ceil(256 / Math.max(rows, columns)));
    const layer = new OffscreenCanvas(columns * times, rows * times), brush = layer.getContext("2d");
    const pixels = brush.createImageData(layer.width, layer.height);
    paint(planes.map(values => refined(values, rows, columns, times))).forEach((colour, i) => pixels.data.set([...colour, 255], 4 * i));
    brush.putImageData(pixels, 0, 0);
    pen.save();
    pen.beginPath();
    const x = firstPixel(left), y = firstPixel(top);
    pen.rect(x, y, firstPixel(this.right) - x, firstPixel(this.bottom) - y);
    pen.clip();
    pen.imageSmoothingEnabled = true;
    pen.drawImage(layer, left, top, columns * this.width, rows * this.height);
    pen.restore();
  }
  // Outline the crop, white on black, if it is not all of the canvas.
  outline(pen) {
    const { width, height, clientWidth } = pen.canvas, dot = width / (clientWidth || width);  // a pixel of the screen
    if (Math.max(this.left, this.top, width - this.right, height - this.bottom) < 0.5) return;
    for (const [colour, line] of [["#000", 3], ["#fff", 1.5]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = line * dot;
      pen.strokeRect(this.left, this.top, this.right - this.left, this.bottom - this.top);
    }
  }
}

// The attention of one query in a block: the mean over some heads, one weight for each patch.
export function weights(rows, layer, heads, query) {
  const sum = new Float64Array(rows.patches);
  for (const h of heads) {
    const row = (layer * rows.kept + h) * rows.queries + query, share = rows.largest[row] / 255 / heads.length;
    for (let i = 0; i < rows.patches; i++) sum[i] += rows.shares[row * rows.patches + i] * share;
  }
  return sum;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

// The rows of page.py, ready for `weights`.
export async function unpackRows(packed, patches) {
  return { patches, queries: packed.queries, kept: Math.max(1, packed.heads.length),
    largest: new Float32Array(await unpacked(packed.largest)), shares: new Uint8Array(await unpacked(packed.shares)) };
}
