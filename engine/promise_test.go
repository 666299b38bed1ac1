package engine_test

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// h100Time is about what steps of an 8B model take on an H100: by tiles of 128 tokens.
func h100Time(s *kernels.Step) time.Duration { return slowerTime(1)(s) }

// slowerTime is so many times that.
func slowerTime(times float64) func(*kernels.Step) time.Duration {
	return func(s *kernels.Step) time.Duration {
		tokens := 0
		for _, q := range s.Seqs {
			tokens += len(q.Tokens)
		}
		tiles := (tokens + 127) / 128
		us := max(5600+30*len(s.Seqs), 1400+3520*tiles)
		return time.Duration(times*float64(us)) * time.Microsecond
	}
}

// served is what a request got.
type served struct{ came, ttft, tpot time.Duration }

// arrivals submits requests of 1,000 tokens in and so many out when they come, and returns what
// each got.
func arrivals(t *testing.T, promise engine.Promise, out int, came []time.Duration) []served {
	t.Helper()
	return arrivalsOn(t, h100Time, promise, out, came)
}

func arrivalsOn(t *testing.T, takes func(*kernels.Step) time.Duration, promise engine.Promise, out int, came []time.Duration) []served {
	t.Helper()
	list := make([]served, len(came))
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.StepTokens, cfg.PrefillTokens, cfg.MaxRunning, cfg.Promise = 8192, 8192, 256, promise
		r := newRigOn(t, cfg, newDevice(enginetest.Config{Blocks: 30000, BlockTokens: 16, MaxPositions: 4096}, takes))
		random := rng()
		began := time.Now()
		var wg sync.WaitGroup
		for i, at := range came {
			q := request(prompt(random, 1000), out)
			q.IgnoreEOS = true
			time.Sleep(time.Until(began.Add(at)))
			wg.Go(func() {
				asked := time.Now()
				h, err := r.Submit(t.Context(), q)
				if err == nil {
					_, err = h.Next(t.Context())
				}
				if err != nil {
					t.Error(err)
					return
				}
				first := time.Now()
				if _, err := readAll(h); err != nil {
					t.Error(err)
				}
				list[i] = served{at, first.Sub(asked), time.Since(first) / time.Duration(max(1, out-1))}
			})
		}
		wg.Wait()
		r.close()
	})
	return list
}

// kept is the part of requests that got what is promised.
func kept(list []served, p engine.Promise) float64 {
	n := 0
	for _, s := range list {
		if s.ttft <= p.TTFT && s.tpot <= p.TPOT {
			n++
		}
	}
	return float64(n) / float64(len(list))
}

// TestPromises: at loads near what the device computes at all, nearly all requests get what is
// promised, where without a promise many do not.
func TestPromises(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for _, c := range []struct {
		promise  engine.Promise
		rate     float64
		least    float64
		unasked  float64 // what is kept without a promise, at most
		duration time.Duration
	}{
		{engine.Promise{TTFT: 500 * time.Millisecond, TPOT: 25 * time.Millisecond}, 32, 0.93, 0.6, 5 * time.Second},
		{engine.Promise{TTFT: time.Second, TPOT: 12 * time.Millisecond}, 26, 0.97, 0.5, 4 * time.Second},
	} {
		came := poisson(c.rate, c.duration)
		with, without := kept(arrivals(t, c.promise, 40, came), c.promise), kept(arrivals(t, engine.Promise{}, 40, came), c.promise)
		t.Logf("%v, %.4g requests a second: %.3f with the promise, %.3f without", c.promise, c.rate, with, without)
		if with < c.least || without > c.unasked {
			t.Errorf("%v, %.4g requests a second: %.3f with the promise, %.3f without; want at least %v, at most %v", c.promise, c.rate, with, without, c.least, c.unasked)
		}
	}
}

// poisson are times of requests that come at random.
func poisson(rate float64, duration time.Duration) (came []time.Duration) {
	random := rand.New(rand.NewPCG(3, 9))
	for at := time.Duration(0); at < duration; at += time.Duration(random.ExpFloat64() / rate * float64(time.Second)) {
		came = append(came, at)
	}
	return came
}

// TestPromisedMean: steps of two tiles nearly take the promised gap. Those of one, which a device that
// is a little slower seems to have to keep to, do not compute what comes; but what they leave of the
// mean is for larger ones.
func TestPromisedMean(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	promise := engine.Promise{TTFT: time.Second, TPOT: 12 * time.Millisecond}
	came := poisson(19.5, 10*time.Second)
	for _, times := range []float64{1, 1.1, 1.2, 1.3} {
		list := arrivalsOn(t, slowerTime(times), promise, 128, came)
		for _, s := range list {
			if s.tpot > promise.TPOT {
				t.Errorf("%v times an H100's steps: a mean gap of %v", times, s.tpot)
				break
			}
		}
		if part := kept(list, promise); part < 0.97 {
			t.Errorf("%v times an H100's steps: %.3f of the requests got what is promised", times, part)
		}
	}
}

// TestPromiseTooLate: of more prompts than can be in time, those that are too late go last, so that
// those that come then are in time; and none waits for ever.
func TestPromiseTooLate(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	var came []time.Duration
	for range 80 { // 2.3 s of work at once
		came = append(came, 0)
	}
	for at := 600 * time.Millisecond; at < 4*time.Second; at += 50 * time.Millisecond {
		came = append(came, at)
	}
	promise := engine.Promise{TTFT: 500 * time.Millisecond}
	count := func(list []served) (burst, later int) {
		for _, s := range list {
			switch {
			case s.ttft > promise.TTFT:
			case s.came == 0:
				burst++
			default:
				later++
			}
		}
		return burst, later
	}
	burst, later := count(arrivals(t, promise, 2, came))
	if all := len(came) - 80; burst < 13 || later < all*9/10 {
		t.Errorf("in time: %d of 80 that came at once, %d of %d that came later", burst, later, all)
	}
	if burst, later := count(arrivals(t, engine.Promise{}, 2, came)); later > (len(came)-80)/2 {
		t.Errorf("without a promise in time: %d, and %d that came later: the case shows nothing", burst, later)
	}
	var flood []time.Duration // 1.4 times what the device computes
	for at := time.Duration(0); at < 9*time.Second; at += 20 * time.Millisecond {
		flood = append(flood, at)
	}
	for _, s := range arrivals(t, engine.Promise{TTFT: 100 * time.Millisecond}, 1, flood) {
		if s.ttft > 6*time.Second {
			t.Fatalf("a prompt that came at %v waited %v", s.came, s.ttft)
		}
	}
}
