"""Draws what scripts/bench-goodput has measured as SVG: goodput over the load, and
where each fleet's tail latencies lie beside the limits."""

COLOURS = ["#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
W, H, LEFT, TOP = 420, 260, 60, 40  # of a panel's inside, and the room before it


def nice(top):
    """A round number not below top."""
    step = 10 ** len(str(int(max(top, 1))))
    return next((step * f for f in (0.1, 0.15, 0.2, 0.3, 0.5, 0.75) if step * f >= top), step)


class Panel:
    def __init__(self, x, y, title, across, up, xmax, ymax):
        self.x, self.y, self.xmax, self.ymax = x, y, xmax, ymax
        self.out = [f'<text x="{x}" y="{y - 12}" font-weight="bold">{title}</text>', f'<rect x="{x}" y="{y}" width="{W}" height="{H}" fill="none" stroke="#999"/>']
        for i in range(5):
            at = self.at(xmax * i / 4, ymax * i / 4)
            self.out += [f'<text x="{at[0]}" y="{y + H + 16}" text-anchor="middle">{xmax * i / 4:g}</text>', f'<text x="{x - 6}" y="{at[1] + 4}" text-anchor="end">{ymax * i / 4:g}</text>']
        self.out += [f'<text x="{x + W / 2}" y="{y + H + 34}" text-anchor="middle">{across}</text>', f'<text transform="translate({x - 44} {y + H / 2}) rotate(-90)" text-anchor="middle">{up}</text>']

    def at(self, across, up):
        return round(self.x + W * min(across, self.xmax) / self.xmax, 1), round(self.y + H - H * min(up, self.ymax) / self.ymax, 1)

    def line(self, points, colour):
        self.out.append(f'<polyline fill="none" stroke="{colour}" points="{" ".join(f"{x},{y}" for x, y in (self.at(*p) for p in points))}"/>')

    def dot(self, across, up, colour, says, fill=None):
        x, y = self.at(across, up)
        self.out.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{fill or colour}" stroke="{colour}" stroke-width="2"><title>{says}</title></circle>')

    def limits(self, across, up):
        (x, y), bottom = self.at(across, up), self.y + H
        self.out.append(f'<rect x="{self.x}" y="{y}" width="{x - self.x}" height="{bottom - y}" fill="#009e73" opacity="0.12"/>')


def draw(s, cells):
    traces, fleets = sorted({c["trace"] for c in cells}), []
    for c in cells:
        if c["fleet"] not in fleets:
            fleets.append(c["fleet"])
    colour = {f: COLOURS[i % len(COLOURS)] for i, f in enumerate(fleets)}
    width, height = 2 * (W + LEFT + 40), len(traces) * (H + TOP + 60) + 60
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{LEFT}" y="20">{s["device"]}; {s["model"]}; {s["window"]} s a cell; the green field: TTFT and ITL within the limits</text>']
    for n, trace in enumerate(traces):
        mine, y = [c for c in cells if c["trace"] == trace], TOP + 20 + n * (H + TOP + 60)
        load = Panel(LEFT, y, f"{trace}: requests a second that were good", "load, of that which the colocated fleet takes", "good requests a second", 2, nice(max(c["good_s"] for c in mine)))
        tail = Panel(2 * LEFT + W + 40, y, f"{trace}: 99th percentiles at the load itself", "TTFT p99, ms", "ITL p99, ms", nice(max([1.3 * s["ttft"]] + [c["ttft"][1] for c in mine])),
                     nice(max([1.3 * s["itl"]] + [c["itl"][1] for c in mine])))
        tail.limits(s["ttft"], s["itl"])
        for f in fleets:
            own = sorted((c for c in mine if c["fleet"] == f), key=lambda c: c["factor"])
            load.line([(c["factor"], c["good_s"]) for c in own], colour[f])
            for c in own:
                load.dot(c["factor"], c["good_s"], colour[f], f"{f}: {c['good_s']:.2f} a second of {c['sent'] / s['window']:.2f}")
                load.dot(c["factor"], c["strict"] / s["window"], colour[f], f"{f}: {c['strict'] / s['window']:.2f} a second without a single longer gap", "white")
                if c["factor"] == 1:
                    tail.dot(c["ttft"][1], c["itl"][1], colour[f], f"{f}: TTFT p99 {c['ttft'][1]:.0f} ms, ITL p99 {c['itl'][1]:.1f} ms")
        out += load.out + tail.out
    for i, f in enumerate(fleets):
        out += [f'<circle cx="{LEFT + 100 * i}" cy="{height - 20}" r="5" fill="{colour[f]}"/>', f'<text x="{LEFT + 10 + 100 * i}" y="{height - 16}">{f}</text>']
    out.append(f'<text x="{LEFT + 100 * len(fleets)}" y="{height - 16}">hollow: those without a single longer gap</text>')
    return "\n".join(out + ["</svg>\n"])
