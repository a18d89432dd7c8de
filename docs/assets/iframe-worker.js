// Pages opened from files may not start a worker, so the search runs in an iframe there; from a server nothing changes.
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      address = new URL(address, document.baseURI).href;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.waiting = [];
      this.scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (typeof this.onmessage === "function") this.onmessage(event);
      };
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = this.scope.document.createElement("script");
          script.src = new URL(source, address).href;
          script.onload = resolve;
          script.onerror = reject;
          this.scope.document.body.appendChild(script);
        });
      this.scope.importScripts = (...sources) => sources.reduce((done, one) => done.then(() => load(one)), Promise.resolve());
      load(address).then(() => {
        const held = this.waiting;
        this.waiting = null;
        held.forEach((data) => this.deliver(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }

    deliver(data) {
      this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  }

  // The theme asks for the list of pages, which a browser refuses for files with an error in its console.
  const open = XMLHttpRequest.prototype.open;
  XMLHttpRequest.prototype.open = function (method, address, ...rest) {
    const empty = "data:application/xml," + encodeURIComponent("<urlset/>");
    return open.call(this, method, /\/sitemap\.xml$/.test(address) ? empty : address, ...rest);
  };

  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
})();
