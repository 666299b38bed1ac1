package way

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
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
	Walled    Reason = "sockets"  // its sockets are in another network namespace or folder
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
	case !w.Local, p.Machine == c.cfg.Machine && c.cfg.Machine != "":
		return addr, "", ""
	}
	ours, theirs := parts(c.cfg.Machine), parts(p.Machine)
	switch {
	case theirs[0] != ours[0]:
		return "", Apart, "on another machine"
	case theirs[1] != ours[1]:
		return "", User, "of another user"
	}
	return "", Walled, "its sockets are elsewhere: containers need one folder for both (kv.sockets)"
}

// parts are the machine, the user and the place of a Machine.
func parts(machine string) (p [3]string) {
	copy(p[:], strings.SplitN(machine, "/", 3))
	return p
}

// CheckSockets refuses a folder in which sockets cannot be, or in which others could put
// their own.
func CheckSockets(folder string) error {
	if len(folder) > local.MaxFolder {
		return fmt.Errorf("%q is longer than %d bytes, which is all that a socket's path has room for", folder, local.MaxFolder)
	}
	dir, err := datadir.OpenAs(folder, "kv.sockets")
	if err != nil {
		return err
	}
	dir.Close()
	return nil
}

// Machine names the machine and the user of this process, and where its unix sockets are:
// in that folder, or, if it is "", in its network namespace. Only processes with the same
// one can share memory. It is MACHINE/USER/PLACE; "" when the system does not say. A folder
// has the same name from whichever container it is seen.
func Machine(sockets string) string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	kind := "folder"
	if sockets == "" {
		kind, sockets = "net", "/proc/self/ns/net"
	}
	info, err := os.Stat(sockets)
	if err != nil {
		return ""
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("%s/%d/%s-%x-%x", strings.TrimSpace(string(boot)), os.Geteuid(), kind, s.Dev, s.Ino)
}
