package sense

import (
	"time"
)

// followPicks brings the picker's table up to each change of the fleet and of
// who has passed a probe, so that requests need not. A little after the first
// pair is there, most of the fleet is, and other routers' knowledge is of use.
func (ms *Members) followPicks() {
	asks := ms.Share != nil
	var settled <-chan time.Time
	for {
		changed, probed := ms.Fleet.Changed(), ms.probes.changed()
		ms.Picker.Refresh(ms.View())
		if asks && ms.HasPair() {
			asks, settled = false, time.After(settling)
		}
		select {
		case <-settled:
			ms.Share.Ask()
		case <-changed:
		case <-probed:
		case <-ms.Ctx.Done():
			return
		}
	}
}

const settling = time.Second
