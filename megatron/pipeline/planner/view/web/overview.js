// All panels at once, above the chart.

/** The whole time axis, one lane a panel, with a window on what the chart shows. */
class Overview {
  constructor(canvas, chart) {
    this.canvas = canvas;
    this.chart = chart;
  }

  get #lane() {
    return Math.max(4, Math.min(18, 72 / this.chart.panels.length));
  }

  get height() {
    return Math.round(this.#lane * this.chart.panels.length) + 4;
  }

  layout(width) {
    const { chart } = this;
    const lane = this.#lane;
    this.width = width;
    this.pen = prepare(this.canvas, width, this.height);
    const bins = Math.max(1, Math.floor((chart.right - LABELS) / 2));
    const pen = prepare((this.lanes = document.createElement("canvas")), width, this.height);
    chart.panels.forEach((panel, index) => {
      const mean = new Float32Array(bins * chart.colours.length);
      for (let rank = 0; rank < panel.ranks; rank++) {
        panel.density(rank, 0, chart.total, bins).forEach((share, at) => (mean[at] += share / panel.ranks));
      }
      const bottom = 2 + (index + 1) * lane - 1;
      const bin = (chart.right - LABELS) / bins;
      pen.fillStyle = chart.theme.idle;
      pen.fillRect(LABELS, bottom - lane + 2, ((chart.right - LABELS) * panel.makespan) / chart.total, lane - 2);
      stack(pen, mean, chart.colours, LABELS, bin, bottom, lane - 2);
    });
  }

  paint() {
    const { pen, chart } = this;
    const [begin, end] = [this.x(chart.from), this.x(chart.to)];
    pen.fillStyle = chart.theme.paper;
    pen.fillRect(0, 0, this.width, this.height);
    pen.drawImage(this.lanes, 0, 0, this.width, this.height);
    pen.globalAlpha = 0.65;
    pen.fillRect(LABELS, 0, begin - LABELS, this.height);
    pen.fillRect(end, 0, chart.right - end, this.height);
    pen.globalAlpha = 1;
    pen.strokeStyle = chart.theme.accent;
    pen.strokeRect(begin, 0.5, Math.max(2, end - begin), this.height - 1);
  }

  x(time) {
    return LABELS + (time / this.chart.total) * (this.chart.right - LABELS);
  }

  time(x) {
    return ((x - LABELS) / (this.chart.right - LABELS)) * this.chart.total;
  }
}
