package cluster

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Counts is what a process must not leak.
type Counts struct {
	Goroutines, FDs int
}

// Counts is Usage without the memory.
func (r *Router) Counts() (map[string]Counts, error) {
	all, err := r.Usage()
	out := map[string]Counts{}
	for id, u := range all {
		out[id] = u.Counts
	}
	return out, err
}

// Usage is the resources of a process.
type Usage struct {
	Counts
	RSS int // bytes
}

func (u Usage) String() string {
	return fmt.Sprintf("%d MiB, %d goroutines, %d descriptors", u.RSS>>20, u.Goroutines, u.FDs)
}

// Usage is the usage of the router, as "router", and of each live worker, as "ID/PID".
func (r *Router) Usage() (map[string]Usage, error) {
	f, err := r.Fleet()
	if err != nil {
		return nil, err
	}
	urls := map[string]string{"router": r.Admin}
	for i := range f.Instances {
		if m := &f.Instances[i]; m.State == fleet.Live {
			urls[fmt.Sprintf("%s/%d", m.ID, m.PID)] = m.URL
		}
	}
	out := map[string]Usage{}
	for id, url := range urls {
		var text string
		if err := get(r.client, url+"/metrics", &text); err != nil {
			return nil, err
		}
		out[id] = Usage{Counts{int(metric(text, "go_goroutines")), int(metric(text, "process_open_fds"))}, int(metric(text, "process_resident_memory_bytes"))}
	}
	return out, nil
}

// Grown is an error if a process in both maps has grown by more than slack.
func Grown(before, now map[string]Counts, slack int) error {
	for _, id := range slices.Sorted(maps.Keys(before)) {
		b := before[id]
		n, ok := now[id]
		if ok && (n.Goroutines > b.Goroutines+slack || n.FDs > b.FDs+slack) {
			return fmt.Errorf("%s: %d goroutines and %d descriptors, before %d and %d", id, n.Goroutines, n.FDs, b.Goroutines, b.FDs)
		}
	}
	return nil
}

// metric sums the samples of a name in the text format; 0 without any.
func metric(text, name string) (sum float64) {
	for line := range strings.SplitSeq(text, "\n") {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		f, _ := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		sum += f
	}
	return sum
}

// ReadMetric reads a process's GET /metrics; see metric.
func ReadMetric(client *http.Client, url, name string) (float64, error) {
	var text string
	err := get(client, url+"/metrics", &text)
	return metric(text, name), err
}

// Metric is one of the router's metrics, summed over its labels.
func (r *Router) Metric(name string) (float64, error) { return ReadMetric(r.client, r.Admin, name) }

// Goroutines is the router's goroutine profile, for the message of a test that found a leak.
func (r *Router) Goroutines() string {
	var text string
	if err := r.Call("GET", "/debug/pprof/goroutine?debug=1", nil, &text); err != nil {
		return err.Error()
	}
	return text
}

// WorkerMetric is one of a live worker's metrics, summed over its labels.
func (r *Router) WorkerMetric(id, name string) (float64, error) {
	f, err := r.Fleet()
	if err != nil {
		return 0, err
	}
	m := f.Get(id)
	if m == nil {
		return 0, fmt.Errorf("no worker %s", id)
	}
	return ReadMetric(r.client, m.URL, name)
}
