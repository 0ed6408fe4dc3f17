// The picture with its answer as one PNG: handed to the system to share where it can, or else saved.

const WIDTH = 1080, EDGE = 48;

export async function share(canvas, title, rows, caption) {
  const some = rows.slice(0, 5), scale = (WIDTH - 2 * EDGE) / canvas.width, height = Math.min(1100, canvas.height * scale);
  const card = document.createElement("canvas"), pen = card.getContext("2d");
  card.width = WIDTH;
  card.height = Math.round(EDGE + height + 130 + some.length * 58 + EDGE);
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, card.width, card.height);
  const w = canvas.width * height / canvas.height;
  pen.imageSmoothingEnabled = canvas.width > 500;
  pen.drawImage(canvas, (WIDTH - w) / 2, EDGE, w, height);
  let y = EDGE + height + 34;
  const write = (text, font, colour, x, align = "left", most = WIDTH - 2 * EDGE) => {
    pen.font = `${font} system-ui, sans-serif`;
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.textBaseline = "top";
    while (text.length > 4 && pen.measureText(text).width > most) text = text.slice(0, -2).trimEnd() + "…";
    pen.fillText(text, x, y);
  };
  write(caption, "26px", "#5d6675", EDGE);
  y += 54;
  for (const [i, { name, value, share: part, colour }] of some.entries()) {
    write(name, i ? "28px" : "600 28px", "#1c2330", EDGE, "left", value ? 700 : WIDTH - 2 * EDGE);
    write(value, "28px", "#1c2330", WIDTH - EDGE, "right", 260);
    y += 36;
    if (part != null) {
      pen.fillStyle = "#eef1f5";
      pen.fillRect(EDGE, y, WIDTH - 2 * EDGE, 9);
      pen.fillStyle = colour ? `rgb(${colour.join(",")})` : colour === null ? "#5d6675" : "#0b62a4";
      pen.fillRect(EDGE, y, (WIDTH - 2 * EDGE) * Math.min(1, part), 9);
    }
    y += 22;
  }
  write(title, "24px", "#5d6675", WIDTH - EDGE, "right");
  const blob = await new Promise(done => card.toBlob(done, "image/png"));
  const file = new File([blob], "vitral.png", { type: "image/png" });
  if (matchMedia("(pointer: coarse)").matches && navigator.canShare?.({ files: [file] })) {
    await navigator.share({ files: [file] }).catch(() => {});
    return;
  }
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "vitral.png" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
