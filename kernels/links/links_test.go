//go:build linux

package links_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kernels/links"
	"github.com/xpyd/xpyd/kvlayout"
)

// device is the links of one fake device, whose NCCL panics where the real one reads
// what is freed, and whose aborts wait for every transfer of the device.
type device struct {
	*kerneltest.FakeGPU
	*links.Group
}

func newDevice(t *testing.T) device {
	g, err := kerneltest.NewFakeGPU(kvlayout.Plain(1, 1, 8, 4, "f32"), 4)
	if err != nil {
		t.Fatal(err)
	}
	d := device{g, g.Links()}
	d.Hurry()
	t.Cleanup(func() {
		if n := d.Live(); n > 0 {
			t.Errorf("%d links have not ended", n)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

const size = 1 << 12

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func open(t *testing.T, d device, id []byte, end kernels.LinkEnd) kernels.Link {
	l, err := d.Open(id, end, size)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// pair is the two ends of a link from one device to another, ready.
func pair(t *testing.T, from, to device) (s, r kernels.Link) {
	id, err := to.NewLink()
	if err != nil {
		t.Fatal(err)
	}
	r, s = open(t, to, id, kernels.LinkReceiver), open(t, from, id, kernels.LinkSender)
	for _, l := range []kernels.Link{s, r} {
		if err := l.Ready(soon(t)); err != nil {
			t.Fatal(err)
		}
	}
	return s, r
}

func transfer(t *testing.T, l kernels.Link, at, n int64) kernels.Pending {
	p, err := l.Transfer(t.Context(), at, n, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func done(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// launched waits until a transfer is on the device.
func launched(t *testing.T, p kernels.Pending) {
	t.Helper()
	select {
	case <-p.(*links.Transfer).Launched():
	case <-soon(t).Done():
		t.Fatal("a transfer is not launched")
	}
}

func TestTransfers(t *testing.T) {
	a, b := newDevice(t), newDevice(t)
	s, r := pair(t, a, b)
	for n := range 40 { // some launches take a while
		clear(r.Memory().Bytes())
		mem := s.Memory().Bytes()
		for i := range mem {
			mem[i] = byte(n + i)
		}
		at := int64(n) * 64
		p, q := transfer(t, r, at, 64), transfer(t, s, at, 64)
		done(t, "send", q.Wait(soon(t)))
		done(t, "receive", p.Wait(soon(t)))
		if got := r.Memory().Bytes()[at : at+64]; !bytes.Equal(got, mem[at:at+64]) {
			t.Fatalf("transfer %d brought %x", n, got)
		}
	}
	if _, err := s.Transfer(t.Context(), size-8, 16, nil); err == nil {
		t.Error("a transfer beyond the end was taken")
	}
	done(t, "close", s.Close(soon(t)))
	done(t, "close", s.Close(soon(t)))
	if err := s.Ready(soon(t)); err == nil {
		t.Error("a closed link is ready")
	}
	if _, err := s.Transfer(t.Context(), 0, 16, nil); err == nil {
		t.Error("a closed link takes transfers")
	}
	late, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	stays := transfer(t, r, 0, 16) // nobody sends it
	if err := stays.Wait(late); !errors.Is(err, kernels.ErrLate) {
		t.Errorf("what nobody sends: %v", err)
	}
	done(t, "close", r.Close(soon(t)))
	stays.Wait(soon(t))
}

// TestAbortWaitsForTransfers: two devices with transfers on their way to each other,
// each waiting for the other's launch, both end a dead peer's link. An abort that did
// not wait would hold up the launches that its device's transfers need.
func TestAbortWaitsForTransfers(t *testing.T) {
	x, y, gone := newDevice(t), newDevice(t), newDevice(t)
	s1, r1 := pair(t, x, y)
	s2, r2 := pair(t, y, x)
	lostX, deadX := pair(t, gone, x)
	lostY, deadY := pair(t, gone, y)
	transfer(t, deadX, 0, 64) // nobody sends these
	transfer(t, deadY, 0, 64)
	p1, p2 := transfer(t, r1, 0, 64), transfer(t, r2, 0, 64)
	launched(t, p1)
	launched(t, p2)
	var ends sync.WaitGroup
	for _, l := range []kernels.Link{deadX, deadY} {
		ends.Go(func() {
			if err := l.Close(soon(t)); err != nil {
				t.Errorf("the end of a dead peer's link: %v", err)
			}
		})
	}
	late, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	deadX.Close(late) // its order has come before the next
	q1, q2 := transfer(t, s1, 0, 64), transfer(t, s2, 0, 64)
	for _, p := range []kernels.Pending{p1, p2, q1, q2} {
		done(t, "a transfer beside the end of another link", p.Wait(soon(t)))
	}
	ends.Wait()
	for _, l := range []kernels.Link{s1, r1, s2, r2, lostX, lostY} {
		done(t, "close", l.Close(soon(t)))
	}
}

// TestHeldUp: a link whose peer is gone, and nobody has noticed, does not hold up the
// end of another for ever: it fails, and both are aborted.
func TestHeldUp(t *testing.T) {
	x, gone := newDevice(t), newDevice(t)
	lost, dead := pair(t, gone, x)
	lost2, hung := pair(t, gone, x)
	p := transfer(t, hung, 0, 64)
	launched(t, p)
	done(t, "close", dead.Close(soon(t)))
	p.Wait(soon(t)) // with whatever
	if err := hung.Ready(soon(t)); err == nil || errors.Is(err, kernels.ErrLate) {
		t.Errorf("the link that held it up: %v", err)
	}
	if n := x.Live(); n != 1 { // its memory is its user's until it is closed
		t.Errorf("%d links live, want 1", n)
	}
	hung.Memory().Bytes()[0] = 1
	for _, l := range []kernels.Link{hung, lost, lost2} {
		done(t, "close", l.Close(soon(t)))
	}
}

// TestAbortHangs: an abort that hangs holds others up for a moment only.
func TestAbortHangs(t *testing.T) {
	x, y := newDevice(t), newDevice(t)
	s, r := pair(t, x, y)
	other, its := pair(t, x, y)
	release := x.HangAborts()
	defer release()
	late, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := other.Close(late); !errors.Is(err, kernels.ErrLate) {
		t.Fatalf("an abort that hangs: %v", err)
	}
	p, q := transfer(t, r, 0, 64), transfer(t, s, 0, 64)
	done(t, "send", q.Wait(soon(t)))
	done(t, "receive", p.Wait(soon(t)))
	release()
	for _, l := range []kernels.Link{other, its, s, r} {
		done(t, "close", l.Close(soon(t)))
	}
}

// TestClosedDuringItsAbort: a link that held up another's end is aborted with it, and its
// owner, told by Failed, closes it while that abort hangs. Its memory is freed when the
// abort has returned (the fake panics if before), and nobody waits for that meanwhile.
func TestClosedDuringItsAbort(t *testing.T) {
	x, y := newDevice(t), newDevice(t)
	lost, dead := pair(t, y, x)
	lost2, hung := pair(t, y, x)
	s, r := pair(t, x, y)
	launched(t, transfer(t, hung, 0, 64)) // nobody sends it
	release := x.HangAborts()
	defer release()
	close := func(l kernels.Link, d time.Duration) {
		t.Helper()
		late, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		if err := l.Close(late); !errors.Is(err, kernels.ErrLate) {
			t.Errorf("an abort that hangs: %v", err)
		}
	}
	close(dead, 0)
	select {
	case <-hung.Failed():
	case <-soon(t).Done():
		t.Fatal("what holds up the end of a link does not fail")
	}
	close(hung, time.Second) // several times as long as others wait for an abort
	p, q := transfer(t, r, 0, 64), transfer(t, s, 0, 64)
	done(t, "send", q.Wait(soon(t)))
	done(t, "receive", p.Wait(soon(t)))
	release()
	for _, l := range []kernels.Link{hung, dead, lost, lost2, s, r} {
		done(t, "close", l.Close(soon(t)))
	}
}

// TestFailure: what NCCL refuses is the link's end, also of what was queued.
func TestFailure(t *testing.T) {
	x, y := newDevice(t), newDevice(t)
	s, r := pair(t, x, y)
	x.BreakLinks()
	for range 3 {
		p := transfer(t, s, 0, 64)
		if err := p.Wait(soon(t)); err == nil || errors.Is(err, kernels.ErrLate) {
			t.Errorf("a transfer that NCCL refuses: %v", err)
		}
	}
	if err := s.Ready(soon(t)); err == nil || errors.Is(err, kernels.ErrLate) {
		t.Errorf("its link: %v", err)
	}
	for _, l := range []kernels.Link{s, r} {
		done(t, "close", l.Close(soon(t)))
	}
}

// TestNobodyJoins: a link whose peer does not come is late, and ends.
func TestNobodyJoins(t *testing.T) {
	d := newDevice(t)
	id, err := d.NewLink()
	done(t, "name", err)
	l := open(t, d, id, kernels.LinkReceiver)
	late, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := l.Ready(late); !errors.Is(err, kernels.ErrLate) {
		t.Errorf("nobody joins: %v", err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- l.Ready(soon(t)) }()
	done(t, "close", l.Close(soon(t)))
	if err := <-waiting; err == nil || errors.Is(err, kernels.ErrLate) {
		t.Errorf("Ready of a link that is closed: %v", err)
	}
}

// TestChurn: many links at once open, transfer and close, at any moment and from either
// end; the fake panics on any call that NCCL would not survive.
func TestChurn(t *testing.T) {
	ds := []device{newDevice(t), newDevice(t), newDevice(t)}
	var all sync.WaitGroup
	for worker := range 6 {
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 1))
			for range 12 {
				from, to := ds[worker%3], ds[(worker+1+worker/3)%3]
				id, err := to.NewLink()
				if err != nil {
					t.Error(err)
					return
				}
				r, err := to.Open(id, kernels.LinkReceiver, size)
				if err != nil {
					t.Error(err)
					return
				}
				s, err := from.Open(id, kernels.LinkSender, size)
				if err != nil {
					t.Error(err)
					return
				}
				joins, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(30))*time.Millisecond)
				var ends sync.WaitGroup
				for _, l := range []kernels.Link{s, r} {
					nap := time.Duration(rnd.IntN(20)) * time.Millisecond
					n := rnd.IntN(30)
					ends.Go(func() {
						if l.Ready(joins) == nil {
							for i := range n {
								if _, err := l.Transfer(t.Context(), int64(i)*16, 16, nil); err != nil {
									break
								}
							}
						}
						time.Sleep(nap) // the other end may be in the midst of anything
						if err := l.Close(soon(t)); err != nil {
							t.Error(err)
						}
					})
					ends.Go(func() { l.Ready(joins) })
				}
				ends.Wait()
				cancel()
			}
		})
	}
	all.Wait()
}
