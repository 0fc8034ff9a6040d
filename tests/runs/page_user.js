// Does to the page of a comparison what a user does. What it shows goes to an attribute of its body.
addEventListener("load", () => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const paths = () => all("#charts .line").map((line) => line.getAttribute("d"));
  const tip = () => document.querySelector(".tip:not([hidden])")?.textContent ?? "";
  const plot = document.querySelector(".plot");
  const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const point = (type, place = {}) => {
    plot.dispatchEvent(new PointerEvent(type, { pointerType: "mouse", ...place }));
  };
  const result = { drawn: paths().length, headings: all("figcaption").map((e) => e.textContent) };

  const frame = plot.querySelector("svg").getBoundingClientRect();
  point("pointermove", { clientX: frame.right - 15, clientY: frame.bottom - 45 });
  result.pointed = tip();
  point("pointerleave");
  result.left = tip();

  press("Home");
  press("ArrowRight");
  result.moved = tip();
  result.spoken = plot.getAttribute("aria-valuetext");
  press("Escape");
  result.escaped = tip();

  const overUpdates = paths();
  all("#axes input")[2].click();
  result.axis = plot.querySelector(".axis-heading").textContent;
  result.absent = document.querySelector(".absent").textContent;
  result.movedCurves = paths().some((path, place) => path !== overUpdates[place]);
  all("#axes input")[0].click();

  const logarithmic = document.getElementById("logarithmic");
  logarithmic.click();
  result.logarithmic = paths().some((path, place) => path !== overUpdates[place]);
  logarithmic.click();
  result.restored = JSON.stringify(paths()) === JSON.stringify(overUpdates);

  const [group] = all("#legend > ul > li > label input");
  const [seed] = all("#legend ul ul input");
  group.click();
  result.withoutGroup = paths().length;
  group.click();
  seed.click();
  result.withoutSeed = paths().length;
  result.isPartly = group.indeterminate;
  seed.click();

  all("#metrics input")[2].click();
  result.charts = all("figure").length;
  result.notNumbers = paths().filter((path) => /NaN|Infinity/.test(path)).length;
  result.isTooWide = document.documentElement.scrollWidth > innerWidth;
  result.errors = errors;
  document.body.dataset.result = JSON.stringify(result);
});
