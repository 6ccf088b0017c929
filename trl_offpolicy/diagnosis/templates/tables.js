"use strict";
// Sorts and filters the tables of a report and its list of responses. Without this script all of it is shown, in the order
// written. Text of a run is compared and searched here; it is never made into markup.
(() => {
  const FEWEST_TO_FILTER = 5;
  const NEXT = { "0": 1, "1": -1, "-1": 0 }; // ascending, descending, as written
  const NAMES = { "1": "ascending", "-1": "descending" };

  // A cell for comparison. "12 / 5" is [12, 5], "0.02 ± 0.01" is [0.02, 0.01]; "–" is missing.
  const keyOf = (text) => {
    const plain = text.trim().replace(/[\u2011\u2212]/g, "-");
    const found = /^[-+]?\.?\d/.test(plain) ? plain.match(/(?:(?<!\d)[-+])?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?/gi) : null;
    return { plain, missing: Number(plain === "" || plain === "–"), numbers: found && found.map(Number) };
  };

  const compare = (a, b) => {
    if (a.numbers && b.numbers) {
      const at = a.numbers.findIndex((one, place) => one !== b.numbers[place]);
      return at < 0 ? a.numbers.length - b.numbers.length : at < b.numbers.length ? a.numbers[at] - b.numbers[at] : 1;
    }
    if (a.numbers || b.numbers) return a.numbers ? -1 : 1;
    return a.plain.localeCompare(b.plain, "en", { numeric: true });
  };

  // The places of the texts in order; what is missing comes last either way, and equals keep their order.
  const order = (texts, direction) => {
    const keys = texts.map(keyOf);
    const places = texts.map((_, place) => place);
    if (direction === 0) return places;
    const difference = (a, b) => keys[a].missing - keys[b].missing || direction * compare(keys[a], keys[b]) || a - b;
    return places.sort(difference);
  };

  // A page that is watched is loaded again and again: what was chosen is kept for as long as its tab is open.
  const stored = (name, value) => {
    try {
      const key = `${location.pathname} ${name}`;
      if (value !== undefined) sessionStorage.setItem(key, JSON.stringify(value));
      return JSON.parse(sessionStorage.getItem(key)) || {};
    } catch {
      return {}; // no storage here
    }
  };

  const make = (tag, attributes, ...inside) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  };

  // items: elements that stay together; texts(column): what each is sorted by; columns: a button and how it shows its state.
  const control = (name, parent, items, texts, columns, show) => {
    const chosen = { column: 0, direction: 0, text: "", ...stored(name) };
    const status = make("span", { role: "status" });
    const sort = () => {
      for (const place of order(texts(chosen.column), chosen.direction)) parent.append(...items[place]);
      columns.forEach((one, column) => show(one, column === chosen.column ? chosen.direction : 0));
    };
    const filter = () => {
      const wanted = chosen.text.trim().toLowerCase();
      let shown = 0;
      for (const item of items) {
        const hit = item.some((one) => one.textContent.toLowerCase().includes(wanted));
        for (const one of item) one.hidden = !hit;
        shown += Number(hit);
      }
      status.textContent = wanted ? `${shown} of ${items.length}` : "";
    };
    columns.forEach((button, column) => {
      button.addEventListener("click", () => {
        chosen.direction = NEXT[column === chosen.column ? chosen.direction : 0];
        chosen.column = column;
        stored(name, chosen);
        sort();
      });
    });
    if (chosen.direction !== 0 && chosen.column < columns.length) sort();
    if (items.length < FEWEST_TO_FILTER) return [];
    const field = make("input", { type: "search", "aria-label": `Filter: ${name}`, placeholder: "filter", value: chosen.text });
    field.addEventListener("input", () => {
      chosen.text = field.value;
      stored(name, chosen);
      filter();
    });
    filter();
    return [field, status];
  };

  const titleOf = (element) => element.closest("section").querySelector("h2").textContent;

  // A row of the class "rule" begins an item; the rows up to the next one belong to it.
  for (const table of document.querySelectorAll("section table")) {
    const heads = table.tHead ? [...table.tHead.rows[0].cells] : [];
    const items = [];
    for (const row of heads.length ? table.tBodies[0].rows : []) {
      if (row.classList.contains("rule")) items.push([row]);
      else items.at(-1).push(row);
    }
    if (items.length < 2) continue;
    const buttons = heads.map((head) => {
      const button = make("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      return button;
    });
    const show = (button, direction) => {
      if (direction === 0) button.parentElement.removeAttribute("aria-sort");
      else button.parentElement.setAttribute("aria-sort", NAMES[direction]);
    };
    const texts = (column) => items.map(([row]) => row.cells[column].textContent);
    const tools = control(titleOf(table), table.tBodies[0], items, texts, buttons, show);
    if (tools.length) table.parentElement.before(make("div", { class: "tools" }, ...tools));
  }

  // A list says what it may be sorted by in data-by, and each of its elements has the values in data-values.
  for (const list of document.querySelectorAll("[data-by]")) {
    const items = [...list.children].map((one) => [one]);
    if (items.length < 2) continue;
    const names = list.dataset.by.split(";");
    const buttons = names.map((one) => make("button", { type: "button", "aria-pressed": "false" }, one));
    const show = (button, direction) => {
      const name = names[buttons.indexOf(button)];
      button.setAttribute("aria-pressed", String(direction !== 0));
      button.setAttribute("aria-label", direction === 0 ? name : `${name}, ${NAMES[direction]}`);
      button.dataset.sort = NAMES[direction] || "";
    };
    const texts = (column) => items.map(([one]) => one.dataset.values.split(";")[column]);
    const tools = control(titleOf(list), list, items, texts, buttons, show);
    const group = make("span", { role: "group", "aria-label": "Sort by" }, "sort by ", ...buttons);
    list.before(make("div", { class: "tools" }, group, ...tools));
  }
})();
