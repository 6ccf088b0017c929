// As much of a browser's document as the script of a report uses, made from {tag, attributes, children}.
// node small_dom.js < {"page": ..., "script": ..., "steps": ...}: runs the script and the steps, prints what each step returns.
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");

class Text {
  constructor(text) { this.textContent = text; }
}

class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, childNodes: [], parentElement: null, listeners: {}, hidden: false });
    this.dataset = new Proxy({}, {
      get: (_, name) => this.attributes[`data-${name}`],
      set: (_, name, value) => ((this.attributes[`data-${name}`] = value), true),
    });
    this.classList = { contains: (name) => (this.attributes.class || "").split(" ").includes(name) };
  }
  get children() { return this.childNodes.filter((one) => one instanceof Element); }
  get textContent() { return this.childNodes.map((one) => one.textContent).join(""); }
  set textContent(text) { this.childNodes = [new Text(text)]; }
  get value() { return this.typed ?? this.attributes.value ?? ""; }
  set value(text) { this.typed = text; }
  get tHead() { return this.children.find((one) => one.tag === "thead"); }
  get tBodies() { return this.children.filter((one) => one.tag === "tbody"); }
  get rows() { return this.children; }
  get cells() { return this.children; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  removeAttribute(name) { delete this.attributes[name]; }
  closest(tag) { return this.tag === tag ? this : this.parentElement?.closest(tag); }
  addEventListener(type, act) { (this.listeners[type] ??= []).push(act); }
  fire(type) { for (const act of this.listeners[type] || []) act(); }
  take(node, next) {
    const one = typeof node === "string" ? new Text(node) : node;
    const around = one.parentElement?.childNodes;
    if (around) around.splice(around.indexOf(one), 1);
    one.parentElement = this;
    this.childNodes.splice(next ? this.childNodes.indexOf(next) : this.childNodes.length, 0, one);
  }
  append(...nodes) { for (const one of nodes) this.take(one); }
  before(...nodes) { for (const one of nodes) this.parentElement.take(one, this); }
  *all() {
    for (const one of this.children) { yield one; yield* one.all(); }
  }
  querySelectorAll(selector) {
    const attribute = /^\[([\w-]+)\]$/.exec(selector)?.[1];
    const [tag, outer] = selector.split(" ").reverse();
    const fits = (one) => (attribute ? attribute in one.attributes : one.tag === tag && (!outer || one.closest(outer)));
    return [...this.all()].filter(fits);
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
}

function build(node) {
  if (typeof node === "string") return node;
  const made = new Element(node.tag);
  made.attributes = node.attributes;
  made.append(...node.children.map(build));
  return made;
}

const { page, script, steps } = JSON.parse(fs.readFileSync(0, "utf-8"));
const storage = new Map();
const sessionStorage = { getItem: (name) => storage.get(name) ?? null, setItem: (name, text) => storage.set(name, text) };

// The page as it is written, with the script run on it; what the browser's tab has stored stays.
function load() {
  const document = build(page);
  document.createElement = (tag) => new Element(tag);
  vm.runInNewContext(script, { document, location: { pathname: "/report.html" }, sessionStorage });
  return document;
}

console.log(JSON.stringify(new Function("load", steps)(load)));
