package way

import (
	"fmt"
	"os"
	"strings"

	"github.com/xpyd/xpyd/kvconn"
)

// Peer is what a worker of the fleet announces about how it is reached.
type Peer struct {
	kvconn.PeerID
	Machine string            // see Machine
	Addrs   map[string]string // way → address, but for the network's
}

// Reason is why a peer is not reached by the fastest way: a metric's label.
type Reason string

// Reasons.
const (
	Setting   Reason = "setting"  // the setting leaves it out
	Memory    Reason = "memory"   // our pool cannot be shared, or this process has no such way
	Stranger  Reason = "stranger" // the peer is not a member of the fleet
	Unoffered Reason = "peer"     // it does not offer it
	Apart     Reason = "machine"  // it is on another machine
	User      Reason = "user"     // it is another user's
	Failed    Reason = "failed"   // its socket does not answer
	Refused   Reason = "refused"  // it cannot write to our pool: GPUs without access to each other
)

// reach returns where w leads to a peer, or why it does not.
func (c *Chooser) reach(w *way, p *Peer) (addr string, reason Reason, why string) {
	addr = p.Addrs[w.Name]
	switch {
	case w.lacks != nil:
		return "", Memory, w.lacks.Error()
	case p.ID == "":
		return "", Stranger, "no member of this fleet"
	case !w.leads(addr), w.Local && p.Machine == "":
		return "", Unoffered, "it does not offer it"
	case !w.Local, p.Machine == c.machine && c.machine != "":
		return addr, "", ""
	}
	ours, _, _ := strings.Cut(c.machine, "/")
	if theirs, _, _ := strings.Cut(p.Machine, "/"); theirs != ours {
		return "", Apart, "on another machine"
	}
	return "", User, "of another user"
}

// Machine names the machine and the user of this process: only processes with the same
// one can share memory. "" when the system does not say.
func Machine() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s/%d", strings.TrimSpace(string(boot)), os.Geteuid())
}
