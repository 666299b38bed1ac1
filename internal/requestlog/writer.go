package requestlog

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/logbuf"
)

// Config says where the log is.
type Config struct {
	// File is the log; "": there is none, and it costs nothing.
	File string `key:"file"`
	// MaxBytes bounds the file together with its older ones.
	MaxBytes int64 `key:"max_bytes" unit:"bytes"`
}

// DefaultConfig is off.
func DefaultConfig() Config { return Config{MaxBytes: 1 << 30} }

// Validate returns a *config.KeyError.
func (c Config) Validate() error {
	return cmp.Or(config.AtLeast("max_bytes", c.MaxBytes, 4<<20))
}

const (
	queued     = 1024      // requests that wait to be written
	batchBytes = 64 << 10  // are written at once
	overshoot  = 256 << 10 // of a file's limit, at most: a batch and a line
)

// Writer writes a log on a goroutine of its own: New, Start, Close. The other methods may be called
// at any time, of a nil Writer too.
type Writer struct {
	log    *slog.Logger
	header func() Header
	file   file

	queue   chan entry
	dropped atomic.Uint64 // requests without a line
	moved   atomic.Bool   // the file may have been moved away
	stop    chan struct{}
	once    sync.Once // closes stop
	running sync.WaitGroup

	// The goroutine's own.
	lines   []byte
	noted   uint64 // of dropped, what the log says
	failing bool
}

type entry struct {
	arrived time.Time
	request Request
	chain   []uint64
}

// New looks whether the log can be written. The first request begins a file, so that a router without any
// leaves older ones alone. header says what a file begins with; its Version and Start do not count.
func New(cfg Config, header func() Header, log *slog.Logger) (*Writer, error) {
	f, err := logbuf.OpenFile(cfg.File)
	if err != nil {
		return nil, config.Bad("file", "%v", err)
	}
	w := &Writer{log: log, header: header, queue: make(chan entry, queued), stop: make(chan struct{})}
	w.file = file{path: cfg.File, limit: cfg.MaxBytes/(kept+1) - overshoot, now: Header{Start: time.Now()}}
	return w, f.Close()
}

// Start begins to write.
func (w *Writer) Start() { w.running.Go(w.run) }

// Add has a request's line written, with its prompt's hashes, which are not to change. It never
// waits: what finds the queue full is dropped.
func (w *Writer) Add(arrived time.Time, r *Request, chain []uint64) {
	select {
	case w.queue <- entry{arrived, *r, chain}:
	default:
		w.dropped.Add(1)
	}
}

// Dropped counts the requests that have no line.
func (w *Writer) Dropped() uint64 {
	if w == nil {
		return 0
	}
	return w.dropped.Load()
}

// Reopen has another file begun if this one was moved away.
func (w *Writer) Reopen() {
	if w != nil {
		w.moved.Store(true)
	}
}

// Close writes what was added, and waits for that. It may be called again, and without Start.
func (w *Writer) Close() {
	if w == nil {
		return
	}
	w.once.Do(func() { close(w.stop) })
	w.running.Wait()
	w.file.close()
}

func (w *Writer) run() {
	for {
		select {
		case e := <-w.queue:
			w.write(&e)
		case <-w.stop:
			for {
				select {
				case e := <-w.queue:
					w.write(&e)
					continue
				default:
				}
				if w.Dropped() > w.noted {
					w.write(nil)
				}
				return
			}
		}
	}
}

// write writes a request, if it is not nil, and what else waits, up to a batch.
func (w *Writer) write(e *entry) {
	lost := w.dropped.Load() // those from now on are for the next batch
	n := uint64(0)
	err := w.file.ready(w.header, w.moved.Swap(false))
	w.lines = w.lines[:0]
	if lost > w.noted {
		w.line(dropped{int(lost - w.noted)})
	}
	for ; e != nil; e = w.more(n) {
		n++
		if err == nil {
			e.request.Arrived = Millis(e.arrived.Sub(w.file.now.Start))
			e.request.Prefix = w.file.keyed(e.chain)
			e.request.fit()
			w.line(&e.request)
		}
	}
	if err == nil {
		err = w.file.add(w.lines)
	}
	if err == nil {
		w.noted = lost
	} else {
		w.dropped.Add(n)
	}
	w.tell(err)
}

// more is the next request of a batch that has n; nil if there is none.
func (w *Writer) more(n uint64) *entry {
	if len(w.lines) < batchBytes && n < queued {
		select {
		case e := <-w.queue:
			return &e
		default:
		}
	}
	return nil
}

func (w *Writer) line(v any) {
	b, err := json.Marshal(v)
	if err != nil { // nothing in a line can be the reason
		w.log.Error("request_log", "err", err)
		return
	}
	w.lines = append(append(w.lines, b...), '\n')
}

// tell logs when the file cannot be written any more, and when it can again.
func (w *Writer) tell(err error) {
	switch failing := err != nil; {
	case failing == w.failing:
	case failing:
		w.log.Error("request_log.file: requests are left out until it can be written again", "err", err)
	default:
		w.log.Info("request_log.file is written again", "left_out", w.Dropped())
	}
	w.failing = err != nil
}
