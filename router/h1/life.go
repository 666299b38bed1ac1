package h1

import (
	"context"
	"io"
	"sync"
	"time"
)

// Life is a scope that ends once, for a reason. It is a context without the standard one's
// tree, locks and five allocations, of which a request would need a dozen. The zero value
// has not ended.
type Life struct {
	mu    sync.Mutex
	done  chan struct{} // nil until somebody asks
	over  bool
	why   error
	conn  io.Closer // closed at the end
	hooks []func()  // called at the end; nil where stopped
	first [1]func() // room for the usual single hook
}

// End ends it. Only the first reason counts; first reports whether this was it.
func (l *Life) End(why error) (first bool) {
	l.mu.Lock()
	if l.over {
		l.mu.Unlock()
		return false
	}
	l.over, l.why = true, why
	if l.done != nil {
		close(l.done)
	}
	conn, hooks := l.conn, l.hooks
	l.conn, l.hooks = nil, nil
	l.mu.Unlock()
	if conn != nil {
		_ = conn.Close() // its user sees the error
	}
	for _, f := range hooks {
		if f != nil {
			f()
		}
	}
	return true
}

// Cause is why it ended; nil before.
func (l *Life) Cause() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.why
}

// hold has the end close conn, one at a time; false if it has ended, and then the caller
// must close conn.
func (l *Life) hold(conn io.Closer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.conn = conn
	return true
}

// release gives up what it holds; false if the end has closed it or is about to.
func (l *Life) release() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = nil
	return !l.over
}

// OnEnd calls f at the end, on the goroutine that ends it, or now, on one of its own, if it
// has ended. f must not block. stop is false if f was called or is about to be.
func (l *Life) OnEnd(f func()) (stop func() bool) {
	l.mu.Lock()
	if l.over {
		l.mu.Unlock()
		go f() // the caller may hold what f locks
		return func() bool { return false }
	}
	if l.hooks == nil {
		l.hooks = l.first[:0]
	}
	n := len(l.hooks)
	l.hooks = append(l.hooks, f)
	l.mu.Unlock()
	return func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.over {
			return false
		}
		l.hooks[n] = nil
		return true
	}
}

// Done is of context.Context, as are Err, which is why it ended, Deadline and Value.
func (l *Life) Done() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done == nil {
		if l.done = make(chan struct{}); l.over {
			close(l.done)
		}
	}
	return l.done
}

func (l *Life) Err() error                  { return l.Cause() }
func (l *Life) Deadline() (time.Time, bool) { return time.Time{}, false }
func (l *Life) Value(any) any               { return nil }

// AfterFunc is how package context follows a foreign context.
func (l *Life) AfterFunc(f func()) (stop func() bool) { return l.OnEnd(func() { go f() }) }

// Within ends l with ctx; stop undoes that.
func (l *Life) Within(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { l.End(context.Cause(ctx)) })
}
