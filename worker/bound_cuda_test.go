//go:build cuda && cgo && linux

package worker_test

import (
	"fmt"
	"regexp"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// TestGPUBound: on a GPU, whose steps overlap, bound answers among others are what they are alone, and what
// they are bound to be; so are those that nothing binds.
func TestGPUBound(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Device, c.KVMemory, c.BatchInvariant = "cuda", 64<<20, true })
	bounds := []string{`([a-z]{2,9} ){10,40}end`, `[A-Z][^A-Z]*`, `(\([0-9]{3}\) [0-9]{3}-[0-9]{4};){5,}`, `yes|no`, ``}
	fields := func(i int) (string, *regexp.Regexp) {
		f := fmt.Sprintf(`"prompt":"Once upon a time %d","seed":%d,"max_tokens":%d,"temperature":%d,"n":%d`, i%3, i, 20+9*i, i%2, 1+i%2)
		b := bounds[i%len(bounds)]
		if b == "" {
			return f, nil
		}
		return f + fmt.Sprintf(`,"structured_outputs":{"regex":%q}`, b), regexp.MustCompile(`^(?s:` + b + `)$`)
	}
	const requests = 40
	want := make([][]string, requests)
	for i := range want {
		f, is := fields(i)
		texts, why := completed(t, w.URL(), f)
		for j, text := range texts {
			if is != nil && why[j] == "stop" && !is.MatchString(text) {
				t.Errorf("%s: %q", f, text)
			}
		}
		want[i] = texts
	}
	var wg sync.WaitGroup
	for i := range want {
		wg.Go(func() {
			f, _ := fields(i)
			if got, _ := completed(t, w.URL(), f); fmt.Sprint(got) != fmt.Sprint(want[i]) {
				t.Errorf("%s: in company %q, alone %q", f, got, want[i])
			}
		})
	}
	wg.Wait()
}
