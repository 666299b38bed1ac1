package links

import "time"

// Hurry makes every wait of links for each other short.
func (g *Group) Hurry() {
	g.lim = limits{launch: 20 * time.Millisecond, shut: 60 * time.Millisecond, open: 20 * time.Millisecond, gate: 600 * time.Millisecond, abort: 300 * time.Millisecond}
}

// Launched is closed when the transfer is on the device, or never will be.
func (t *Transfer) Launched() <-chan struct{} { return t.launched }
