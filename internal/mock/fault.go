package mock

import (
	"fmt"
	"strconv"
	"strings"
)

// Fault is what goes wrong with requests; a router's probes are exempt unless
// Probes is set.
type Fault struct {
	Status   int  // answer with it; 0: no
	Hang     bool // never answer
	Refuse   bool // close connections without an answer
	Event    bool // 200, then an error as the first event
	Cut      int  // break the connection after so many chunks; 0: no
	Freeze   int  // say nothing more after so many chunks; 0: no
	Mute     bool // prefill: do the work, and never answer
	NoParams bool // prefill: answer without what decode needs, as an engine without its connector
	Probes   bool // probes suffer it too
}

// ParseFault reads "status=500", "hang", "refuse", "error-event", "cut=3",
// "freeze=3", "mute", "no-params", or "" for none; "probes" beside one, with a
// comma, makes probes suffer it too.
func ParseFault(s string) (Fault, error) {
	if s == "" {
		return Fault{}, nil
	}
	var f Fault
	for part := range strings.SplitSeq(s, ",") {
		name, value, given := strings.Cut(part, "=")
		n, err := strconv.Atoi(value)
		switch {
		case name == "status" && err == nil && n >= 300 && n < 600:
			f.Status = n
		case name == "cut" && err == nil && n > 0:
			f.Cut = n
		case name == "freeze" && err == nil && n > 0:
			f.Freeze = n
		case given:
			return Fault{}, badFault(s)
		case name == "hang":
			f.Hang = true
		case name == "refuse":
			f.Refuse = true
		case name == "error-event":
			f.Event = true
		case name == "mute":
			f.Mute = true
		case name == "no-params":
			f.NoParams = true
		case name == "probes":
			f.Probes = true
		default:
			return Fault{}, badFault(s)
		}
	}
	return f, nil
}

func badFault(s string) error {
	return fmt.Errorf("fault %q is none of status=CODE, hang, refuse, error-event, cut=CHUNKS, freeze=CHUNKS, mute, no-params, and probes beside one", s)
}
