// Explanations of a model: attention of every block and head, patch by patch, and the maps of other methods.

import { Place, painted, percent, digits, scaleOf, unpackRows, weights } from "/page/maps.js";

export const NAMES = { picture: "Picture", attention: "Attention", rollout: "Rollout", relevance: "Relevance", gradcam: "Grad-CAM", writing: "Writing", tokens: "Tokens" };
// A description of each method for newcomers.
export const MEANINGS = {
  rollout: "The attention of all blocks, multiplied: which patches can have contributed to the prediction.",
  relevance: "Attention times the gradient of the class's score, through all blocks: what supports the class.",
  gradcam: "The last features, weighted by how much each raises the class's score: what supports the class.",
  writing: "The attention of the decoder for each token of its text.",
  tokens: "The three principal components of the patch features, as red, green and blue.",
};
export const BY_CLASS = ["relevance", "gradcam"];

export class Look {
  // The attention of a ViT is complete (`live`); that of windows, or of many patches, is requested block by block.
  // `query` is the patch whose attention is shown, -1 for [CLS] or all patches; `at` the one under the pointer; `head` -1
  // for their mean. `layer` and `query` are what the user chose; `told` what the maps show until the server responds.
  // Maps are drawn on `bitmap`, the original image, or on the input of the model if the browser cannot decode the file.
  static async from(explained, { blocks, cls }, bitmap) {
    const look = new Look(), [rows, columns] = explained.grid, packed = explained.rows;
    Object.assign(look, { method: explained.method, about: explained.about, part: explained.part, rows, columns, packed, cls,
      titles: explained.titles, maps: explained.maps, map: 0, at: -1, layers: packed?.layers ?? blocks, target: explained.class,
      timing: explained.timing });
    look.picture = new Image();
    look.picture.src = `data:image/png;base64,${explained.image}`;
    await look.picture.decode();
    const { width, height } = look.picture, [H, W] = explained.size, own = bitmap?.width === W && bitmap?.height === H;
    look.photo = own ? bitmap : look.picture;
    look.crop = own ? explained.crop : [0, 0, width, height];
    const [left, top, right, bottom] = explained.crop;
    look.patch = own ? explained.cell : [explained.cell[0] * height / (bottom - top), explained.cell[1] * width / (right - left)];
    look.width = Math.ceil(Math.max(look.photo.width, look.crop[2]) - 1e-3);  // with padding
    look.height = Math.ceil(Math.max(look.photo.height, look.crop[3]) - 1e-3);
    look.attends = explained.method === "attention";
    look.live = look.attends && Boolean(packed);
    if (look.live) {
      look.weights = await unpackRows(packed, rows * columns);
      look.layer = packed.layers - 1;
      look.head = packed.heads.length === 1 ? 0 : -1;
      look.query = look.cls ? -1 : look.middle;
    } else {
      look.told = { layer: explained.layer, query: explained.patch ? look.cell(...explained.patch) : -1 };
      look.settle();
    }
    return look;
  }
  // The grid of patches on a canvas that has the image at `scale`.
  gridAt(scale) { return new Place(this.crop, this.patch, [this.rows, this.columns], scale); }
  // The patch at a pixel of the model's input, and the pixel in the middle of a patch.
  cell(x, y) {
    const [left, top, right, bottom] = this.crop, { width, height } = this.picture;
    return this.gridAt(1).at(left + (x + 0.5) / width * (right - left), top + (y + 0.5) / height * (bottom - top));
  }
  pixel(i) {
    const [left, top, right, bottom] = this.crop, { x, y, w, h } = this.gridAt(1).box(i);
    return [Math.floor((x + w / 2 - left) / (right - left) * this.picture.width),
      Math.floor((y + h / 2 - top) / (bottom - top) * this.picture.height)];
  }
  get middle() { return Math.floor(this.rows / 2) * this.columns + Math.floor(this.columns / 2); }
  place(i) { return `row ${Math.floor(i / this.columns) + 1}, column ${i % this.columns + 1}`; }
  get frame() { return this.live || (this.attends && this.at < 0) ? this.query : this.at; }
  get asked() { return this.attends && this.query !== this.frame ? this.query : -1; }
  get shown() { return this.live ? this : this.told; }
  settle() { Object.assign(this, this.told); }

  choose(patch) {
    this.at = patch;
    if (this.live) this.query = patch;
  }

  // What is shown: values of the patches and how to paint them, the ends of the scale, and a sentence.
  view(table) {
    if (this.method === "tokens") {
      const paint = ([r, g, b]) => r.map((v, i) => [v, g[i], b[i]].map(c => Math.round(255 * c)));
      return { planes: this.maps.map(map => map.flat()), paint, say: "Patches of similar colour are similar to the model." };
    }
    const values = this.live ? this.row() : this.maps[this.map].flat();
    const s = scaleOf(values), best = values.indexOf(s.high), tell = this.attends || this.method === "writing" ? percent : digits;
    const planes = [values], paint = ([some]) => painted(some, s.top, table), ends = [s.low < 0 ? tell(-s.top) : "0", tell(s.top)];
    const here = this.at >= 0 ? this.at : best;
    if (this.attends) {
      const { layer, query } = this.shown, whose = query < 0 && !this.cls ? "their" : "its";
      const all = this.cls ? "[CLS] looks" : "All patches together look", who = query < 0 ? all : `The patch in ${this.place(query)} looks`;
      const more = this.live || here === best ? "" : ` ${percent(values[here])} go to ${this.place(here)}.`;
      const even = s.low > 0.6 * s.high ? " It is spread almost evenly." : "";
      return { planes, paint, ends, signed: false, say: `${who} most at ${this.place(best)}: ${percent(s.high)} of ${whose} attention in block ${layer}, ${this.headName}.${even}${more}` };
    }
    return { planes, paint, ends, signed: s.low < 0, say: `${this.titles[this.map]}: ${tell(values[here])} in ${this.place(here)}` +
      (here === best ? ", the most." : `; the most is ${tell(values[best])} in ${this.place(best)}.`) };
  }
  row() {
    const heads = this.head < 0 ? [...Array(this.weights.kept).keys()] : [this.head];
    return Array.from(weights(this.weights, this.layer, heads, this.query < 0 ? 0 : this.query + (this.cls ? 1 : 0)));
  }
  get headName() {
    if (!this.live) return this.titles[this.map];
    return this.head < 0 ? "mean of heads" : `head ${this.packed.heads[this.head] ?? this.head}`;
  }

  draw(pen, scale, strength, style, table) {
    const { width, height } = pen.canvas, shown = this.view(table), grid = this.gridAt(scale), { photo, picture } = this;
    const [w, h] = [photo.width * scale, photo.height * scale];
    pen.imageSmoothingEnabled = scale < 1;
    pen.drawImage(picture, picture.width - 1, picture.height - 1, 1, 1, 0, 0, width, height);  // the colour of padding
    pen.fillStyle = "#fff";  // transparent pixels are white to the model
    pen.fillRect(0, 0, w, h);
    pen.drawImage(photo, 0, 0, w, h);
    grid.draw(pen, shown.planes, shown.paint, style, strength);
    grid.outline(pen);
    return shown;
  }
}
