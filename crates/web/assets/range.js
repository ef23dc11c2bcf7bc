// The window of time that all charts of a device show: the last minutes as they pass, or a part that was
// zoomed into or paused at, which stands still.

/** Lengths that can be chosen, in milliseconds, with their names. */
export const SPANS = [[300_000, '5 min'], [900_000, '15 min'], [3_600_000, '1 h']];
/** The shortest window that one can zoom into. */
const SPAN_MIN = 5_000;
/** Lengths of windows over little data, in milliseconds: the next longer one is used, so that the charts of a
 * page just opened are not nearly empty. */
const SHORT = [60_000, 120_000];

export const range = {
  span: SPANS[0][0],
  /** Fixed start and end; `null`: the window ends at the newest sample. */
  from: null,
  to: null,
  /** Start and end of the range that the pointer is selecting; `null`: no range. */
  selection: null,
  listeners: new Set(),

  /** Whether the window stands still. */
  get isFixed() {
    return this.to !== null;
  },

  /** The window over samples: its start and end. */
  over(samples) {
    if (this.isFixed) return [this.from, this.to];
    const end = samples.at(-1)?.t ?? Date.now();
    const length = end - (samples[0]?.t ?? end);
    const span = this.span > SPANS[0][0] ? this.span : SHORT.find((short) => length <= short) ?? this.span;
    return [end - span, end];
  },

  /** Shows the last `span` milliseconds, as they pass. */
  follow(span = this.span) {
    Object.assign(this, { span, from: null, to: null, selection: null });
    this.changed();
  },

  /** Shows the range between two times, given in either order, but nothing after `newest`. */
  zoom(one, other, newest = Infinity) {
    const middle = (one + other) / 2;
    const half = Math.min(Math.max(Math.abs(other - one), SPAN_MIN), SPANS.at(-1)[0]) / 2;
    const to = Math.min(middle + half, newest);
    Object.assign(this, { from: to - 2 * half, to, selection: null });
    this.changed();
  },

  select(selection) {
    this.selection = selection;
    this.changed();
  },

  changed() {
    for (const listener of this.listeners) listener();
  },
};
