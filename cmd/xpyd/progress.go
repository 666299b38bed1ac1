package main

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/model"
)

// progress shows long work, at most a line a second, with its speed and how long it will take yet. Any number of goroutines
// may report.
func progress(w io.Writer) func(model.Progress) {
	var mu sync.Mutex
	var of model.Progress // when it began
	var began time.Time
	last := time.Now()
	return func(p model.Progress) {
		mu.Lock()
		defer mu.Unlock()
		now := time.Now()
		if p.Phase != of.Phase || p.What != of.What {
			of, began = p, now
		}
		if now.Sub(last) < time.Second {
			return
		}
		last = now
		line := fmt.Sprintf("%s %s: %d of %d MiB (%d%%)", p.Phase, p.What, p.Done>>20, p.Total>>20, 100*p.Done/max(p.Total, 1))
		if did, took := p.Done-of.Done, now.Sub(began); did > 0 && took > 0 && p.Done < p.Total {
			speed := float64(did) / took.Seconds()
			line += fmt.Sprintf(", %.0f MiB/s, %v left", speed/(1<<20), max(time.Second, time.Duration(float64(p.Total-p.Done)/speed*1e9).Round(time.Second)))
		}
		fmt.Fprintln(w, line)
	}
}
