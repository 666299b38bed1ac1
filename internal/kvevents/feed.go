package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/zmtp"
)

// Handler receives what a feed learns, one call at a time and in order.
type Handler interface {
	Apply(*Batch)
	// Reset means that what was applied may be wrong by now: forget it.
	Reset(reason string)
}

// FeedConfig says which publisher to follow.
type FeedConfig struct {
	Endpoint string // host:port of the publisher
	Replay   string // host:port of its replay socket; "" if it has none
	Topic    string // prefix of the topics wanted; "" for all
	// Keys returns the keys for each new connection; nil if the publisher asks for none. While it
	// fails, nothing is dialled.
	Keys    func() (*zmtp.Keys, error)
	Handler Handler
	Log     *slog.Logger
}

// Stats counts a Feed's events.
type Stats struct {
	Connected atomic.Bool
	Batches   atomic.Uint64
	Gaps      atomic.Uint64 // in the sequence, mended by replay or not
	Resets    atomic.Uint64 // that could not be mended
	Malformed atomic.Uint64
	failure   atomic.Pointer[error]
}

// Failure returns why the feed is not connected; nil if it is, or has not tried yet.
func (s *Stats) Failure() error {
	if err := s.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// Refused reports whether a failure is one of trust, which only other settings or secrets end:
// the publisher wants a key that we lack, or takes none where we show one.
func Refused(err error) bool {
	return errors.Is(err, ErrNoSecret) || errors.Is(err, zmtp.ErrRefused) || errors.Is(err, zmtp.ErrMechanism)
}

// Feed follows one publisher: one data-parallel rank of one engine. Run does the work.
type Feed struct {
	cfg   FeedConfig
	stats Stats
	seed  maphash.Seed

	toldRefused, toldAnew seldom

	heard bool   // something was applied since the last reset
	next  uint64 // sequence number wanted
	print uint64 // of the payload before next

	// Within a session live numbers only rise. A replay has covered those below caughtUp.
	live     uint64 // the number after the last live one
	caughtUp uint64
}

// NewFeed prepares a feed.
func NewFeed(cfg FeedConfig) *Feed {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Feed{cfg: cfg, seed: maphash.MakeSeed()}
}

// Stats may be read at any time.
func (f *Feed) Stats() *Stats { return &f.stats }

const (
	firstWait  = 100 * time.Millisecond // after a lost connection, doubling
	lastWait   = 5 * time.Second
	maxBatch   = 8 << 20
	replayTime = 10 * time.Second
	endSeq     = math.MaxUint64 // -1, after the last batch of a replay
)

// Run follows the publisher until ctx ends, and then closes its connections.
func (f *Feed) Run(ctx context.Context) {
	wait := firstWait
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for ctx.Err() == nil {
		began := time.Now()
		err := f.session(ctx)
		f.stats.failure.Store(&err)
		f.stats.Connected.Store(false)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > lastWait {
			wait = firstWait
		}
		if Refused(err) {
			if n, ok := f.toldRefused.due(); ok {
				f.cfg.Log.Warn("kv events refused; do the publisher and this process have the same fleet secret?", "endpoint", f.cfg.Endpoint, "err", err, "left_out", n)
			}
		}
		f.cfg.Log.Debug("kv events", "endpoint", f.cfg.Endpoint, "err", err, "again_in", wait)
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		wait = min(2*wait, lastWait)
	}
}

// session is one connection.
func (f *Feed) session(ctx context.Context) error {
	c, err := f.dial(ctx, f.cfg.Endpoint, zmtp.Sub)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	defer c.Close()
	if err := c.Subscribe(f.cfg.Topic); err != nil {
		return err
	}
	f.live, f.caughtUp = 0, 0
	if f.cfg.Replay != "" {
		f.resume(ctx)
	}
	f.stats.failure.Store(nil)
	f.stats.Connected.Store(true)
	var frames [][]byte
	for {
		if frames, err = c.ReadMessage(frames); err != nil {
			return err
		}
		if len(frames) != 3 || len(frames[1]) != 8 {
			return fmt.Errorf("%w: %d frames", ErrMalformed, len(frames))
		}
		f.message(ctx, binary.BigEndian.Uint64(frames[1]), frames[2])
	}
}

// dial connects with the current keys.
func (f *Feed) dial(ctx context.Context, addr string, t zmtp.Type) (*zmtp.Conn, error) {
	cfg := zmtp.Config{Type: t, MaxMessage: maxBatch}
	if f.cfg.Keys != nil {
		var err error
		if cfg.Keys, err = f.cfg.Keys(); err != nil {
			return nil, err
		}
	}
	return zmtp.Dial(ctx, addr, cfg)
}

// message takes one live batch.
func (f *Feed) message(ctx context.Context, seq uint64, payload []byte) {
	again := seq < f.live
	f.live = seq + 1
	switch {
	case again: // the numbers start over
		f.reset(fmt.Sprintf("the sequence went back to %d", seq))
		if seq > 0 && f.cfg.Replay != "" && f.replay(ctx, 0, nil) == nil && seq < f.next {
			return
		}
	case f.heard && seq < f.caughtUp:
		return // already applied by the replay
	case f.heard && seq < f.next:
		f.reset(fmt.Sprintf("sequence number %d after %d", seq, f.next-1))
	case f.heard && seq > f.next:
		f.stats.Gaps.Add(1)
		if f.mend(ctx, seq) {
			return
		}
	}
	f.applyBatch(seq, payload)
}

// mend fetches the batches missing before seq. It returns false if seq itself is to be applied.
func (f *Feed) mend(ctx context.Context, seq uint64) bool {
	missing := fmt.Sprintf("%d batches before %d were lost", seq-f.next, seq)
	if f.cfg.Replay == "" {
		f.reset(missing)
		return false
	}
	if err := f.replay(ctx, f.next, nil); err != nil {
		f.reset(fmt.Sprintf("%s: %v", missing, err))
		return false
	}
	if f.heard && f.next <= seq { // the replay is over before it
		if f.next < seq {
			f.reset(missing)
		}
		return false
	}
	return f.heard
}

// resume checks, on a new connection, that this is the publisher that we know: it repeats our
// last batch.
func (f *Feed) resume(ctx context.Context) {
	if f.heard && f.next > 0 {
		same := false
		err := f.replay(ctx, f.next-1, func(seq uint64, payload []byte) bool {
			same = seq == f.next-1 && maphash.Bytes(f.seed, payload) == f.print
			return same
		})
		if same && err == nil {
			return
		}
		f.reset("reconnected, and the publisher is not the one from before")
	}
	if err := f.replay(ctx, 0, nil); err != nil {
		f.cfg.Log.Debug("kv events replay", "endpoint", f.cfg.Replay, "err", err)
	}
}

var errStopped = errors.New("not the batch that was expected")

// replay applies all batches from a number on. The first one goes to check instead, if that is
// not nil; it may end the replay.
func (f *Feed) replay(ctx context.Context, from uint64, check func(uint64, []byte) bool) error {
	ctx, cancel := context.WithTimeout(ctx, replayTime)
	defer cancel()
	c, err := f.dial(ctx, f.cfg.Replay, zmtp.Dealer)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	defer c.Close()
	if err := c.WriteMessage(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return err
	}
	var frames [][]byte
	for {
		if frames, err = c.ReadMessage(frames); err != nil {
			return err
		}
		// A delimiter, the topic (from some publishers), the number, the batch.
		n := len(frames)
		if n < 2 || n > 4 || len(frames[n-2]) != 8 {
			return fmt.Errorf("%w: a replay of %d frames", ErrMalformed, n)
		}
		seq := binary.BigEndian.Uint64(frames[n-2])
		if seq == endSeq {
			f.caughtUp = f.next
			return nil
		}
		if check != nil {
			if !check(seq, frames[n-1]) {
				return errStopped
			}
			check = nil
			continue
		}
		switch {
		case f.heard && seq < f.next:
			continue
		case f.heard && seq > f.next: // its oldest batch is too new
			f.reset(fmt.Sprintf("batches %d to %d are gone from the replay", f.next, seq-1))
		}
		f.applyBatch(seq, frames[n-1])
	}
}

// applyBatch applies one batch.
func (f *Feed) applyBatch(seq uint64, payload []byte) {
	f.next, f.print, f.heard = seq+1, maphash.Bytes(f.seed, payload), true
	b, err := Decode(payload)
	if err != nil {
		f.stats.Malformed.Add(1)
		f.reset(err.Error())
		f.heard = true // the numbers go on
		return
	}
	f.stats.Batches.Add(1)
	f.cfg.Handler.Apply(b)
}

func (f *Feed) reset(reason string) {
	f.heard = false
	f.stats.Resets.Add(1)
	if n, ok := f.toldAnew.due(); ok {
		f.cfg.Log.Info("kv events start anew", "endpoint", f.cfg.Endpoint, "reason", reason, "left_out", n)
	}
	f.cfg.Handler.Reset(reason)
}
