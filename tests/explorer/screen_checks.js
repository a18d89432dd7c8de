// What a reader would see in a window: texts that overlap or leave their figure, low contrast, a page wider than the window.
() => {
  const found = { overlaps: [], clipped: [], contrast: [], wide: document.documentElement.scrollWidth - innerWidth };
  const isShown = e => e.checkVisibility({ opacityProperty: true, visibilityProperty: true })
    && !e.closest(".for-readers, .skip, [aria-hidden=true]") && !isClipped(e);
  function isClipped(e) {  // for screen readers only
    for (let at = e; at; at = at.parentElement) if (getComputedStyle(at).clipPath.startsWith("inset")) return true;
    return false;
  }
  const name = (text, e) => `${text.trim().slice(0, 40)} <${e.tagName} ${e.className.baseVal ?? e.className}>`;

  // ---- boxes: four corners, because the labels of some axes are turned ------------------------------------------
  const corners = (box, matrix) => [[box.x, box.y], [box.x + box.width, box.y], [box.x + box.width, box.y + box.height], [box.x, box.y + box.height]]
    .map(([x, y]) => { const p = new DOMPoint(x, y).matrixTransform(matrix); return [p.x, p.y]; });
  const inset = (box, x, y) => ({ x: box.x + x, y: box.y + y, width: box.width - 2 * x, height: box.height - 2 * y });
  function apart(a, b) {  // whether a line along a side of either separates them
    for (const shape of [a, b]) for (let n = 0; n < 4; n++) {
      const [x0, y0] = shape[n], [x1, y1] = shape[(n + 1) % 4], along = ([x, y]) => (x - x0) * (y1 - y0) - (y - y0) * (x1 - x0);
      const [one, other] = [a, b].map(s => s.map(along));
      if (Math.max(...one) <= Math.min(...other) || Math.max(...other) <= Math.min(...one)) return true;
    }
    return false;
  }
  function compare(items) {
    items.forEach((one, n) => items.slice(n + 1).forEach(other => {
      if (one.node !== other.node && !apart(one.shape, other.shape)) found.overlaps.push(`${one.name} / ${other.name}`);
    }));
  }

  // ---- texts of figures ----------------------------------------------------------------------------------------
  document.querySelectorAll(".plot, .lab svg").forEach(figure => {
    if (!isShown(figure) || !figure.getBoundingClientRect().width) return;
    const around = figure.closest(".panels, .plot").getBoundingClientRect(), items = [];
    figure.querySelectorAll("text").forEach(text => {
      if (!text.textContent.trim() || !isShown(text) || getComputedStyle(text).fillOpacity === "0") return;
      const rect = text.getBoundingClientRect(), box = text.getBBox();
      if (!rect.width) return;
      items.push({ node: text, name: name(text.textContent, text), shape: corners(inset(box, 1, box.height * 0.12), text.getScreenCTM()) });
      if (rect.left < around.left - 1 || rect.right > around.right + 1 || rect.top < around.top - 1 || rect.bottom > around.bottom + 1)
        found.clipped.push(name(text.textContent, text));
    });
    compare(items);
  });

  // ---- texts of the page ---------------------------------------------------------------------------------------
  const items = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.data.trim() || !isShown(e) || e.closest("svg, script, style, option, [role=listbox]")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects())
      if (rect.width > 2 && rect.height > 2)
        items.push({ node, name: name(node.data, e), shape: corners(inset(rect, 1, rect.height * 0.25), new DOMMatrix()) });
    check(node.data, e, getComputedStyle(e).color);
  }
  compare(items);
  document.querySelectorAll("input, textarea").forEach(e => {
    if (!isShown(e) || ["range", "radio", "checkbox"].includes(e.type)) return;
    if (e.value) check(e.value, e, getComputedStyle(e).color);
    else if (e.placeholder) check(e.placeholder, e, getComputedStyle(e, "::placeholder").color);
  });
  document.querySelectorAll(".plot text, .lab svg text").forEach(e => {
    if (e.textContent.trim() && isShown(e)) check(e.textContent, e, getComputedStyle(e).fill);
  });

  // ---- contrast, as WCAG 2.1 computes it --------------------------------------------------------------------------
  function parse(colour) {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  }
  function luminance([r, g, b]) {
    const [x, y, z] = [r, g, b].map(v => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  }
  function over(top, below) { return [0, 1, 2].map(n => top[n] * top[3] + below[n] * (1 - top[3])); }
  function background(e) {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      const layer = parse(getComputedStyle(at).backgroundColor);
      if (layer[3] > 0) layers.push(layer);
      if (layer[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  }
  function check(text, e, colour) {
    const style = getComputedStyle(e), size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const below = background(e), ink = over(parse(colour), below);
    const [high, low] = [luminance(ink), luminance(below)].sort((a, b) => b - a), ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (size >= 24 || (bold && size >= 18.66) ? 3 : 4.5)) found.contrast.push(`${ratio.toFixed(2)} ${name(text, e)} ${colour}`);
  }
  return found;
}
