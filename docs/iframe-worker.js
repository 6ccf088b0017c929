// Search without a server: a browser starts no Worker from file://, so there the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const page = this.frame.contentDocument
      page.open()
      page.write("<body></body>")
      page.close()
      const inside = this.frame.contentWindow
      const load = (src) =>
        new Promise((resolve, reject) => {
          const script = page.createElement("script")
          Object.assign(script, { src, onload: resolve, onerror: reject })
          page.body.append(script)
        })
      // what a script expects of a worker: answers go to the page, further scripts are loaded in turn
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve())
      this.ready = load(url)
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
