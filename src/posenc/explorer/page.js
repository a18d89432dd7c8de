// Requests views from the server and draws them. render.py makes the responses, layout.py the elements they fill.
window.posenc ??= (() => {
  const pages = {};  // key -> {running, next, last, requested, restored, fitting, width}
  const part = (key, name) => document.getElementById(key + "-" + name);
  const page = key => (pages[key] ??= { running: false, next: null, last: null, requested: false });
  const frame = () => new Promise(done => requestAnimationFrame(done));
  // aria-busy: whether the page still waits for its controls, for a response or for a figure. Screen readers wait for it,
  // and so do programs that drive the page.
  function updateBusy(key) {
    const mine = page(key), idle = mine.last && mine.restored !== undefined && !mine.running && !mine.fitting;
    part(key, "figures")?.querySelector(".view")?.setAttribute("aria-busy", String(!idle));
  }

  // ---- requests: one at a time for each page; of those that wait, only the last is sent -------------------------
  async function request(key, wanted) {
    const mine = page(key);
    mine.requested = true;
    mine.next = wanted;
    mine.aborted?.abort();  // a finer figure of a view that is out of date
    if (mine.running) return;
    mine.running = true;
    updateBusy(key);
    try {
      while (mine.next) {
        const now = mine.next;
        mine.next = null;
        const response = await send(key, now);
        if (response === null) continue;
        mine.last = now;
        await show(key, response);
        if (response.finer && !mine.next) mine.next = { ...now, coarse: false };
      }
    } finally {
      mine.running = false;
      updateBusy(key);
    }
  }
  async function send(key, wanted) {
    const view = part(key, "figures").querySelector(".view"), mine = page(key);
    const waiting = setTimeout(() => { part(key, "progress").hidden = false; }, 300);
    mine.aborted = wanted.coarse === false ? new AbortController() : null;
    try {
      const body = { page: key, language: view.dataset.language, width: view.clientWidth, ...wanted };
      const response = await fetch("/draw", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
        signal: mine.aborted?.signal,
      });
      return await response.json();
    } catch (error) {
      if (error.name === "AbortError") return null;
      const alert = document.createElement("p");
      alert.className = "input-error";
      alert.setAttribute("role", "alert");
      alert.textContent = view.dataset.noResponse;
      return { status: alert.outerHTML };
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
  async function show(key, response) {
    if (response.plots) {
      while (!window.Plotly) await frame();  // a control may change before it is loaded
      const width = part(key, "figures").querySelector(".view").clientWidth;
      const drawn = [];
      document.querySelectorAll(`#${key}-figures .plot`).forEach((plot, number) => {
        const text = response.plots[number], box = plot.firstElementChild;
        plot.hidden = !text;
        if (!text || box.posenc === text) return;
        const figure = JSON.parse(text);
        plot.style.height = figure.layout.height + "px";
        plot.setAttribute("role", "figure");
        plot.setAttribute("aria-label", response.titles[number]);
        box.posenc = text;
        // pass the settings only once: passing them again makes the browser lay out the page in between
        if (box._context) drawn.push(window.Plotly.react(box, figure.data, figure.layout));
        else drawn.push(withoutBase(() => window.Plotly.react(box, figure.data, figure.layout, figure.config)));
      });
      await Promise.all(drawn);
      set(part(key, "html"), response.html);
      const code = part(key, "code");
      code.hidden = !response.code;
      code.querySelector("code").textContent = response.code;
      part(key, "tools").hidden = false;
      part(key, "link").setAttribute("href", response.link);
      listTables(key, response.csv);
      if (width) updateAddress(key);
    }
    if (response.cleared) {  // figures of another model next to the error would mislead
      document.querySelectorAll(`#${key}-figures .plot`).forEach(plot => {
        plot.hidden = true;
        plot.firstElementChild.posenc = null;
      });
      set(part(key, "html"), "");
      part(key, "code").hidden = part(key, "tools").hidden = true;
    }
    set(part(key, "status"), response.status);
  }
  function listTables(key, tables) {  // one file for each table of the view
    part(key, "csv").querySelector("ul").replaceChildren(...tables.map(([title, address], number) => {
      const link = document.createElement("a"), item = document.createElement("li");
      link.href = address;
      link.download = `posenc-${key}-${number + 1}.csv`;
      link.textContent = title;
      item.append(link);
      return item;
    }));
    part(key, "csv").hidden = !tables.length;
  }
  // On a page with a base URL Plotly writes absolute references into its SVG, which break once the address changes.
  function withoutBase(draw) {
    const base = document.querySelector("base[href]"), href = base?.getAttribute("href");
    base?.removeAttribute("href");
    try {
      return draw();
    } finally {
      base?.setAttribute("href", href);
    }
  }
  // Keep the address in step with the view, so that reloading or sharing it gives the same view.
  function updateAddress(key) {
    const link = part(key, "link").getAttribute("href");
    if (link) history.replaceState(null, "", link);
  }

  // ---- starting ------------------------------------------------------------------------------------------------
  async function ready(key) {  // wait until the page is visible and Plotly is loaded
    while (!part(key, "figures")?.querySelector(".view")?.clientWidth || !window.Plotly) await frame();
    if (page(key).watched) return;
    page(key).watched = new ResizeObserver(() => fit(key));
    page(key).watched.observe(part(key, "figures").querySelector(".view"));
  }
  function fit(key) {  // the number of panels per row depends on the width, so a new width needs a new figure
    const width = part(key, "figures").querySelector(".view").clientWidth, mine = page(key);
    if (!width || width === mine.width) return;
    const first = mine.width === undefined;
    mine.width = width;
    if (first || !mine.last) return;
    clearTimeout(mine.fitting);
    mine.fitting = setTimeout(() => {
      mine.fitting = null;
      document.querySelectorAll(`#${key}-figures .plot > div`).forEach(box => { box.posenc = null; });
      request(key, { ...mine.last, coarse: true });
    }, 150);
    updateBusy(key);
  }
  async function start() {
    const query = location.search, given = new URLSearchParams(query).get("view");
    while (!document.querySelector("header.top")) await frame();
    document.documentElement.lang = document.querySelector("header.top").dataset.language;
    const [first, ...others] = document.querySelector("header.top").dataset.pages.split(" ");
    const key = others.includes(given) ? given : first;
    page(key).requested = true;  // from the address, not from the controls, which are not restored yet
    await ready(key);
    request(key, { query });
  }
  // Figures have a white background, so the page uses the light theme whatever the system prefers.
  function begin() {
    if (!new URLSearchParams(location.search).has("__theme")) document.body.classList.remove("dark");
    start();
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();

  function openPage(key, values) {  // draw a page when it is first opened
    ready(key).then(() => (page(key).requested ? updateAddress(key) : request(key, { values })));
  }

  // ---- called by buttons and Gradio's events ----------------------------------------------------------------------
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
    // Controls also fire when they appear and when a link sets them; only new values are drawn.
    draw(key, values) {
      const mine = page(key), text = JSON.stringify(values);
      if (mine.restored !== undefined && mine.restored !== text) {
        mine.restored = text;
        request(key, { values });
      }
      return [];
    },
    open(key, values) {
      const mine = page(key);
      mine.opened = true;
      if (mine.restored !== undefined) openPage(key, values);
      return [];
    },
    isOfLink(key, value) {  // whether a control has this value from a link, not from the user
      const { restored } = page(key);
      return restored === undefined || JSON.parse(restored).includes(value);
    },
    restored(key, values) {
      page(key).restored = JSON.stringify(values);
      if (page(key).opened) openPage(key, values);
      updateBusy(key);
      const all = document.querySelector("header.top").dataset.pages.split(" ");
      if (all.every(each => page(each).restored !== undefined)) document.documentElement.classList.add("restored");
      return [];
    },
    chooseLanguage(link, language) {  // the next visit opens in it
      document.cookie = `posenc-language=${language}; path=/; max-age=31536000; samesite=lax`;
      link.search = location.search;
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
