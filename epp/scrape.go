package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// pool follows the file of endpoints and their metrics. An endpoint gets requests once its metrics
// have been read, until they could not be in lostAfter looks in a row.
type pool struct {
	file   string
	every  time.Duration
	client *http.Client
	picker *pick.Picker
	log    *slog.Logger

	snapshot atomic.Pointer[fleet.Snapshot]

	// The loop's alone.
	known []endpoint            // of the last good file
	fails map[string]int        // by address: looks in a row without metrics; lostAfter or more: it is lost
	loads map[string]fleet.Load // as last read
}

const (
	scrapeTimeout = 2 * time.Second // or the interval, if that is longer
	lostAfter     = 3
	maxMetrics    = 4 << 20
	// othersTokens is what a request that this process did not send counts for at prefill: engines
	// say how many there are, not how long.
	othersTokens = 1000
)

// run looks at once and then every interval, until ctx ends. looked is called after each look.
func (p *pool) run(ctx context.Context, looked func()) {
	tick := time.NewTicker(p.every)
	defer tick.Stop()
	for {
		p.look(ctx)
		looked()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look reads the file and all metrics once.
func (p *pool) look(ctx context.Context) {
	list, err := readEndpoints(p.file)
	if err != nil {
		p.log.Warn("the endpoints stay as they were", "err", err)
		list = p.known
	}
	p.known = list
	ctx, cancel := context.WithTimeout(ctx, max(p.every, scrapeTimeout))
	defer cancel()
	loads, errs := make([]fleet.Load, len(list)), make([]error, len(list))
	var all sync.WaitGroup
	for i := range list { // at once, at most maxEndpoints: none waits for another that hangs
		all.Go(func() { loads[i], errs[i] = p.scrape(ctx, "http://"+list[i].Address) })
	}
	all.Wait()
	fails, last := map[string]int{}, map[string]fleet.Load{}
	members := make([]fleet.Member, len(list))
	for i := range list {
		at, m := list[i].Address, &members[i]
		*m = list[i].member()
		if errs[i] != nil {
			before, known := p.fails[at]
			if fails[at] = before + 1; !known {
				fails[at] = lostAfter // it has never been well
			}
			loads[i], m.Reason = p.loads[at], errs[i].Error()
		} else {
			fails[at] = 0
		}
		last[at], m.Load = loads[i], loads[i]
		if fails[at] < lostAfter {
			m.State = fleet.Live
		}
	}
	p.fails, p.loads = fails, last
	p.publish(members)
}

// publish makes the members the fleet, and tells the picker what others have on them.
func (p *pool) publish(members []fleet.Member) {
	old, version := p.snapshot.Load(), uint64(1)
	next := fleet.NewSnapshot(version, time.Time{}, members)
	if old != nil {
		if next.Version = old.Version; !alike(old, next) {
			next.Version++
		}
	}
	for i := range next.Members {
		if m := &next.Members[i]; old == nil || old.Get(m.ID) == nil || old.Get(m.ID).State != m.State {
			p.log.Info("endpoint", "address", m.ID, "role", m.Role, "state", m.State, "reason", m.Reason)
		}
	}
	p.snapshot.Store(next)
	p.picker.Refresh(pick.View{Snapshot: next})
	var others []pick.WorkerLoad
	for i := range next.Members {
		m := &next.Members[i]
		own := p.picker.Loads(m.ID, m.Epoch)
		more := max(0, m.Load.Running+m.Load.Waiting-own.Legs)
		l := pick.WorkerLoad{ID: m.ID, Epoch: m.Epoch, Loads: pick.Loads{Legs: more}}
		if m.Role == fleet.Prefill {
			l.Tokens = more * othersTokens
		} else {
			l.Seqs = more
		}
		others = append(others, l)
	}
	p.picker.SetOthers(others)
}

// alike reports whether two snapshots have the same members in the same states; load does not count.
func alike(a, b *fleet.Snapshot) bool {
	if len(a.Members) != len(b.Members) {
		return false
	}
	for i := range a.Members {
		x, y := a.Members[i], b.Members[i]
		x.Load, y.Load, x.Reason, y.Reason = fleet.Load{}, fleet.Load{}, "", ""
		if !reflect.DeepEqual(x, y) {
			return false
		}
	}
	return true
}

func (p *pool) scrape(ctx context.Context, url string) (fleet.Load, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return fleet.Load{}, err
	}
	resp, err := p.client.Do(q)
	if err != nil {
		return fleet.Load{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fleet.Load{}, fmt.Errorf("metrics: %s", resp.Status)
	}
	page := &io.LimitedReader{R: resp.Body, N: maxMetrics + 1}
	load, err := parseMetrics(page)
	if err == nil && page.N == 0 {
		err = fmt.Errorf("metrics: more than %d bytes", maxMetrics)
	}
	return load, err
}

// parseMetrics finds how many requests run and wait, by the names that vLLM, SGLang and xpyd give
// them, summed over their labels. Of an engine that names neither both are 0.
func parseMetrics(r io.Reader) (load fleet.Load, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 4<<10), 64<<10)
	for lines.Scan() {
		line := lines.Text()
		name, rest, _ := strings.Cut(line, " ")
		if at := strings.IndexByte(line, '{'); at >= 0 && at < len(name) {
			end := strings.LastIndexByte(line, '}')
			if end < at {
				continue
			}
			name, rest = line[:at], line[end+1:]
		}
		var to *int
		switch name {
		case "vllm:num_requests_running", "sglang:num_running_reqs", "xpyd_engine_running_sequences":
			to = &load.Running
		case "vllm:num_requests_waiting", "sglang:num_queue_reqs", "xpyd_engine_waiting_sequences":
			to = &load.Waiting
		default:
			continue
		}
		value, _, _ := strings.Cut(strings.TrimSpace(rest), " ") // a timestamp may follow
		v, err := strconv.ParseFloat(value, 64)
		if err != nil || !(v >= 0 && v < 1<<20) {
			return load, fmt.Errorf("metrics: %s is %q", name, value)
		}
		*to += int(v)
	}
	return load, lines.Err()
}
