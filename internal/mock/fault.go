package mock

import (
	"fmt"
	"strconv"
	"strings"
)

// Fault is what goes wrong with requests. A router's probes are exempt unless Probes is set.
type Fault struct {
	Status   int  // answer with it; 0: no
	Hang     bool // never answer
	Refuse   bool // close connections without an answer
	Event    bool // 200, then an error as the first event
	Cut      int  // break the connection after this many chunks; 0: no
	Freeze   int  // send nothing after this many chunks; 0: no
	Mute     bool // prefill: do the work, and never answer
	NoParams bool // prefill: answer without what decode needs, like an engine without its connector
	Probes   bool // also for probes
}

// ParseFault reads "status=500", "hang", "refuse", "error-event", "cut=3", "freeze=3", "mute",
// "no-params", or "" for none. A ",probes" at the end includes probes.
func ParseFault(s string) (Fault, error) {
	if s == "" {
		return Fault{}, nil
	}
	var f Fault
	flags := map[string]*bool{"hang": &f.Hang, "refuse": &f.Refuse, "error-event": &f.Event, "mute": &f.Mute, "no-params": &f.NoParams, "probes": &f.Probes}
	counts := map[string]*int{"status": &f.Status, "cut": &f.Cut, "freeze": &f.Freeze}
	for part := range strings.SplitSeq(s, ",") {
		name, value, given := strings.Cut(part, "=")
		n, err := strconv.Atoi(value)
		switch flag, count := flags[name], counts[name]; {
		case flag != nil && !given:
			*flag = true
		case count != nil && err == nil && n > 0 && (name != "status" || n >= 300 && n < 600):
			*count = n
		default:
			return Fault{}, fmt.Errorf("fault %q is none of status=CODE, hang, refuse, error-event, cut=CHUNKS, freeze=CHUNKS, mute, no-params, and probes beside one", s)
		}
	}
	return f, nil
}
