package router

import (
	"context"
	"io"
	"sync"
)

// life is a scope that ends once, for a reason: what a context would do, less
// its tree, its locks and five allocations, of which a request would need a
// dozen. The zero value has not ended.
type life struct {
	mu    sync.Mutex
	over  bool
	why   error
	conn  io.Closer // closed at the end
	hooks []func()  // called at the end; nil where stopped
}

// end ends it; the first reason counts.
func (l *life) end(why error) {
	l.mu.Lock()
	if l.over {
		l.mu.Unlock()
		return
	}
	l.over, l.why = true, why
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
}

// cause is why it has ended, nil if it has not.
func (l *life) cause() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.why
}

// hold makes the end close conn, one at a time; false when it has ended, and
// then conn is the caller's to close.
func (l *life) hold(conn io.Closer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.conn = conn
	return true
}

// release gives up what it holds; false when the end has closed it, or will
// in a moment.
func (l *life) release() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = nil
	return !l.over
}

// onEnd calls f at the end, on the goroutine that ends it, or at once, on one
// of its own, when that has been. f must not block. stop is false when f was
// called or is about to be.
func (l *life) onEnd(f func()) (stop func() bool) {
	l.mu.Lock()
	if l.over {
		l.mu.Unlock()
		go f() // the caller may hold what f locks
		return func() bool { return false }
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

// context is one that ends with l; cancel frees it.
func (l *life) context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := l.onEnd(func() { cancel(l.cause()) })
	return ctx, func() { stop(); cancel(nil) }
}

// within ends l with ctx; stop ends that.
func (l *life) within(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { l.end(context.Cause(ctx)) })
}
