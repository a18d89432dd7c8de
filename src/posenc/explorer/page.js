// Asks the server for views and draws them. The server's side is answer.py; the places are made in frame.py.
window.posenc ??= (() => {
  const pages = {};  // name -> {running, next, last, asked, known, fitting, width}
  const part = (key, name) => document.getElementById(key + "-" + name);
  const page = key => (pages[key] ??= { running: false, next: null, last: null, asked: false });
  const frame = () => new Promise(done => requestAnimationFrame(done));
  // aria-busy: whether the page still waits for its controls, for an answer or for a picture. Readers of the screen wait
  // with it, and so does whoever drives the page by program.
  function tell(key) {
    const mine = page(key), idle = mine.last && mine.known !== undefined && !mine.running && !mine.fitting;
    part(key, "figures")?.querySelector(".view")?.setAttribute("aria-busy", String(!idle));
  }

  // ---- asking: one question at a time for each page, and of those that wait only the last ----------------------
  async function ask(key, wanted) {
    const mine = page(key);
    mine.asked = true;
    mine.next = wanted;
    mine.aborted?.abort();  // a finer picture of what is no longer wanted
    if (mine.running) return;
    mine.running = true;
    tell(key);
    try {
      while (mine.next) {
        const now = mine.next;
        mine.next = null;
        const answer = await answered(key, now);
        if (answer === null) continue;
        mine.last = now;
        await show(key, answer);
        if (answer.finer && !mine.next) mine.next = { ...now, coarse: false };
      }
    } finally {
      mine.running = false;
      tell(key);
    }
  }
  async function answered(key, wanted) {
    const view = part(key, "figures").querySelector(".view"), mine = page(key);
    const waiting = setTimeout(() => { part(key, "progress").hidden = false; }, 300);
    mine.aborted = wanted.coarse === false ? new AbortController() : null;
    try {
      const asked = { page: key, language: view.dataset.language, width: view.clientWidth, ...wanted };
      const answer = await fetch("/draw", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked),
        signal: mine.aborted?.signal,
      });
      return await answer.json();
    } catch (error) {
      if (error.name === "AbortError") return null;
      const told = document.createElement("p");
      told.className = "sentence";
      told.setAttribute("role", "alert");
      told.textContent = view.dataset.silent;
      return { status: told.outerHTML };
    } finally {
      mine.aborted = null;
      clearTimeout(waiting);
      part(key, "progress").hidden = true;
    }
  }

  // ---- showing ---------------------------------------------------------------------------------------------------
  function set(element, html) {
    if (element.posenc !== html) element.innerHTML = element.posenc = html;
  }
  async function show(key, answer) {
    if (answer.plots) {
      const width = part(key, "figures").querySelector(".view").clientWidth;
      const drawn = [];
      document.querySelectorAll(`#${key}-figures .plot`).forEach((place, number) => {
        const text = answer.plots[number], box = place.firstElementChild;
        place.hidden = !text;
        if (!text || box.posenc === text) return;
        const figure = JSON.parse(text);
        place.style.height = figure.layout.height + "px";
        place.setAttribute("role", "figure");
        place.setAttribute("aria-label", answer.titles[number]);
        box.posenc = text;
        // the settings only the first time: giving them again makes the browser lay out the page in between
        if (box._context) drawn.push(window.Plotly.react(box, figure.data, figure.layout));
        else drawn.push(withoutBase(() => window.Plotly.react(box, figure.data, figure.layout, figure.config)));
      });
      await Promise.all(drawn);
      set(part(key, "html"), answer.html);
      const code = part(key, "code");
      code.hidden = !answer.code;
      code.querySelector("code").textContent = answer.code;
      part(key, "tools").hidden = false;
      part(key, "link").setAttribute("href", answer.link);
      part(key, "csv").setAttribute("href", answer.csv);
      if (width) address(key);
    }
    if (answer.cleared) {  // numbers of another model beside the sentence would be taken for this one's
      document.querySelectorAll(`#${key}-figures .plot`).forEach(place => {
        place.hidden = true;
        place.firstElementChild.posenc = null;
      });
      set(part(key, "html"), "");
      part(key, "code").hidden = part(key, "tools").hidden = true;
    }
    set(part(key, "status"), answer.status);
  }
  // On a page with a base address Plotly writes the whole address into what it draws; after the address has changed
  // nothing of it would be found.
  function withoutBase(draw) {
    const base = document.querySelector("base[href]"), href = base?.getAttribute("href");
    base?.removeAttribute("href");
    try {
      return draw();
    } finally {
      base?.setAttribute("href", href);
    }
  }
  // The address always names the view that is shown, so that reloading or sharing it shows the same.
  function address(key) {
    const link = part(key, "link").getAttribute("href");
    if (link) history.replaceState(null, "", link);
  }

  // ---- starting ------------------------------------------------------------------------------------------------
  async function ready(key) {  // there, to be seen, and with something to draw with
    while (!part(key, "figures")?.querySelector(".view")?.clientWidth || !window.Plotly) await frame();
    if (page(key).watched) return;
    page(key).watched = new ResizeObserver(() => fit(key));
    page(key).watched.observe(part(key, "figures").querySelector(".view"));
  }
  function fit(key) {  // panels beside each other depend on the width, so another width is another figure
    const width = part(key, "figures").querySelector(".view").clientWidth, mine = page(key);
    if (!width || width === mine.width) return;
    const first = mine.width === undefined;
    mine.width = width;
    if (first || !mine.last) return;
    clearTimeout(mine.fitting);
    mine.fitting = setTimeout(() => {
      mine.fitting = null;
      document.querySelectorAll(`#${key}-figures .plot > div`).forEach(box => { box.posenc = null; });
      ask(key, { ...mine.last, coarse: true });
    }, 150);
    tell(key);
  }
  async function start() {
    const query = location.search, given = new URLSearchParams(query).get("view");
    while (!document.querySelector("header.top")) await frame();
    const [first, ...others] = document.querySelector("header.top").dataset.pages.split(" ");
    const key = others.includes(given) ? given : first;
    page(key).asked = true;  // by the address, and not by what its controls hold before they are set
    await ready(key);
    ask(key, { query });
  }
  // Figures are white; the page around them is light too, whatever the system prefers.
  function begin() {
    if (!new URLSearchParams(location.search).has("__theme")) document.body.classList.remove("dark");
    start();
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();

  function first(key, values) {  // a page is drawn when it is first opened
    ready(key).then(() => (page(key).asked ? address(key) : ask(key, { values })));
  }

  // ---- what buttons and Gradio's events call ----------------------------------------------------------------------
  function copy(button, text) {
    const before = button.textContent;
    const done = () => {
      button.textContent = button.dataset.done;
      setTimeout(() => { button.textContent = before; }, 1500);
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => prompt(before, text));
    else prompt(before, text);
  }
  return {
    // Controls also say that they changed when they appear and when a link sets them; only what is new is drawn.
    draw(key, values) {
      const mine = page(key), text = JSON.stringify(values);
      if (mine.known !== undefined && mine.known !== text) {
        mine.known = text;
        ask(key, { values });
      }
      return [];
    },
    open(key, values) {
      const mine = page(key);
      mine.opened = true;
      if (mine.known !== undefined) first(key, values);
      return [];
    },
    restored(key, values) {
      page(key).known = JSON.stringify(values);
      if (page(key).opened) first(key, values);
      tell(key);
      const all = document.querySelector("header.top").dataset.pages.split(" ");
      if (all.every(each => page(each).known !== undefined)) document.documentElement.classList.add("restored");
      return [];
    },
    copyLink(button, key) {
      copy(button, new URL(part(key, "link").getAttribute("href"), location.href).href);
    },
    copyCode(button) {
      copy(button, button.closest(".code").querySelector("code").textContent);
    },
    png(key) {
      const figures = document.querySelectorAll(`#${key}-figures .js-plotly-plot`);
      figures.forEach((figure, number) => {
        const { width, height } = figure._fullLayout;
        const name = "posenc-" + key + (figures.length > 1 ? "-" + (number + 1) : "");
        window.Plotly.downloadImage(figure, { format: "png", width, height, scale: 2, filename: name });
      });
    },
  };
})();
