// Browsers refuse workers on pages that are opened from disk, and the search runs in a worker.
// On these pages, this class runs the script of a worker in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      // an opened document is not replaced when the frame has loaded
      inside.document.open()
      inside.document.write("<body></body>")
      inside.document.close()
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise((resolve) => (script.onload = resolve))
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
