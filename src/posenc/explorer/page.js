// The address always names the view that is shown, so that reloading or sharing it shows the same.
function posencAddress(key) {
  const link = document.getElementById(key + "-link");
  if (link) history.replaceState(null, "", link.getAttribute("href"));
  return [];
}
function posencCopy(button, key) {
  posencCopyText(button, new URL(document.getElementById(key + "-link").getAttribute("href"), location.href).href);
}
function posencCopyCode(button) {
  posencCopyText(button, button.closest(".tools").previousElementSibling.textContent);
}
function posencCopyText(button, text) {
  const before = button.textContent;
  const done = () => {
    button.textContent = button.dataset.done;
    setTimeout(() => { button.textContent = before; }, 1500);
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => prompt(before, text));
  else prompt(before, text);
}
function posencPng(key) {
  const figures = document.querySelectorAll("#" + key + "-figures .js-plotly-plot");
  figures.forEach((figure, number) => {
    const { width, height } = figure._fullLayout;
    const name = "posenc-" + key + (figures.length > 1 ? "-" + (number + 1) : "");
    window.Plotly.downloadImage(figure, { format: "png", width, height, scale: 2, filename: name });
  });
}
// Figures are white; the page around them is light too, whatever the system prefers.
if (!new URLSearchParams(location.search).has("__theme")) {
  document.addEventListener("DOMContentLoaded", () => document.body.classList.remove("dark"));
}
