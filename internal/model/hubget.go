package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const maxRedirects = 10

var errStalled = errors.New("no bytes arrived for too long")

// response is the answer at the end of a chain of redirects.
type response struct {
	status int
	header http.Header
	body   io.ReadCloser
	etag   string // of the content, as the hub itself states it; not cleaned
	size   int64  // -1 if not stated
}

// get requests u, which is the hub's, from offset on. The hub states checksum
// and size on its own answer, before it redirects to storage; the token stays on
// the hub's host, and HEAD does not go to signed storage URLs. An answer other
// than 200 or 206 is a *statusError.
func (h *hub) get(ctx context.Context, method string, u *url.URL, offset int64) (_ *response, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := time.AfterFunc(h.stall, func() { cancel(errStalled) })
	stop := func() { watch.Stop(); cancel(nil) }
	defer func() {
		if err != nil {
			stop()
		}
	}()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, fatal{unsigned(err)}
	}
	h.authorize(req)
	req.Header.Set("User-Agent", "xpyd")
	req.Header.Set("Accept-Encoding", "identity")
	if offset > 0 {
		req.Header.Set("Range", "bytes="+strconv.FormatInt(offset, 10)+"-")
	}
	out := &response{size: -1}
	client := *h.http
	client.CheckRedirect = func(next *http.Request, via []*http.Request) error {
		from := next.Response.Request.URL
		if h.home(from) {
			out.note(next.Response.Header)
		}
		switch to := next.URL; {
		case len(via) == maxRedirects:
			return fatal{fmt.Errorf("more than %d redirects", maxRedirects)}
		case to.Scheme != "https" && (to.Scheme != "http" || from.Scheme == "https"):
			return fatal{fmt.Errorf("redirect from %s to %s is refused", from.Scheme, to.Scheme)}
		case method == http.MethodHead && to.Host != h.endpoint.Host:
			return http.ErrUseLastResponse
		}
		next.Header.Del("Referer")
		h.authorize(next)
		return nil
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, stalledOr(ctx, unsigned(err))
	}
	home := h.home(resp.Request.URL)
	if home {
		out.note(resp.Header)
	}
	switch {
	case resp.StatusCode == http.StatusOK && out.size < 0:
		out.size = resp.ContentLength
	case resp.StatusCode == http.StatusOK, resp.StatusCode == http.StatusPartialContent:
	case method == http.MethodHead && resp.StatusCode/100 == 3:
	default:
		resp.Body.Close()
		return nil, h.refusal(resp, home)
	}
	out.status, out.header = resp.StatusCode, resp.Header
	out.body = &watchedBody{ReadCloser: resp.Body, ctx: ctx, watch: watch, stall: h.stall, stop: stop}
	return out, nil
}

func (h *hub) home(u *url.URL) bool {
	return u.Host == h.endpoint.Host && u.Scheme == h.endpoint.Scheme
}

// authorize gives the token to requests that go to the hub, and to no others.
func (h *hub) authorize(req *http.Request) {
	req.Header.Del("Authorization")
	if h.token != "" && h.home(req.URL) {
		req.Header.Set("Authorization", "Bearer "+h.token)
	}
}

// note records what the hub states about the content behind a redirect.
func (r *response) note(h http.Header) {
	r.etag = cmp.Or(h.Get("X-Linked-Etag"), r.etag, h.Get("Etag"))
	if n, err := strconv.ParseInt(h.Get("X-Linked-Size"), 10, 64); err == nil && n >= 0 {
		r.size = n
	}
}

// unsigned removes the query from the URL in err: that of a storage link is as good as a
// token, and errors are logged.
func unsigned(err error) error {
	var e *url.Error
	if errors.As(err, &e) {
		e.URL, _, _ = strings.Cut(e.URL, "?")
	}
	return err
}

// watchedBody gives up on a body that is silent for too long.
type watchedBody struct {
	io.ReadCloser
	ctx   context.Context
	watch *time.Timer
	stall time.Duration
	stop  func()
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.watch.Reset(b.stall)
	if err != nil && err != io.EOF {
		err = stalledOr(b.ctx, err)
	}
	return n, err
}

func (b *watchedBody) Close() error {
	err := b.ReadCloser.Close()
	b.stop()
	return err
}

func stalledOr(ctx context.Context, err error) error {
	if context.Cause(ctx) == errStalled {
		return errStalled
	}
	return err
}

// fatal marks an error that another attempt would meet again.
type fatal struct{ error }

func (f fatal) Unwrap() error { return f.error }

// statusError is an unsuccessful HTTP response.
type statusError struct {
	status    int
	text      string
	retryable bool
	after     time.Duration // the server's Retry-After
}

func (e *statusError) Error() string { return e.text }

// refusal explains an unsuccessful response to the user.
func (h *hub) refusal(resp *http.Response, home bool) error {
	e := &statusError{status: resp.StatusCode}
	id := h.owner + "/" + h.name
	text := resp.Status
	switch code := resp.Header.Get("X-Error-Code"); {
	case !home:
		// Signed storage links expire: another attempt gets a new one.
		e.retryable = resp.StatusCode == http.StatusForbidden
		text += " from the storage behind the hub"
	case resp.StatusCode == http.StatusUnauthorized && h.token == "":
		text += ": " + id + " does not exist or is private; for a private model set HF_TOKEN"
	case resp.StatusCode == http.StatusUnauthorized:
		text += ": the hub does not accept HF_TOKEN, or " + id + " does not exist"
	case resp.StatusCode == http.StatusForbidden:
		text += ": no access to " + id + "; accept its terms at " + h.endpoint.JoinPath(h.owner, h.name).Redacted() + " and set HF_TOKEN"
	case resp.StatusCode == http.StatusNotFound && code == "RevisionNotFound":
		text += ": " + id + " has no revision " + h.rev
	case resp.StatusCode == http.StatusNotFound && code == "EntryNotFound":
		text += ": " + id + " has no such file"
	case resp.StatusCode == http.StatusNotFound:
		text += ": there is no " + id + ", or no revision " + h.rev + " of it"
	default:
		if m := resp.Header.Get("X-Error-Message"); m != "" {
			text += fmt.Sprintf(": %.200q", m)
		}
	}
	e.text = text
	switch {
	case resp.StatusCode >= 500, resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode == http.StatusRequestTimeout:
		e.retryable = true
		if s, err := strconv.Atoi(strings.TrimSpace(resp.Header.Get("Retry-After"))); err == nil && s > 0 {
			e.after = min(time.Duration(min(s, 60))*time.Second, time.Minute)
		}
	}
	return e
}

// retry calls fn until it succeeds, fails for good, or fails maxAttempts
// times without progress. once forbids a second attempt.
func (h *hub) retry(ctx context.Context, once bool, fn func() (progress bool, err error)) error {
	for failures := 0; ; {
		progress, err := fn()
		if err == nil {
			return nil
		}
		if cerr := ctx.Err(); cerr != nil {
			return fmt.Errorf("%w (%v)", cerr, err)
		}
		var dead fatal
		var status *statusError
		isStatus := errors.As(err, &status)
		if errors.As(err, &dead) || (isStatus && !status.retryable) {
			return err
		}
		if progress {
			failures = 0
		}
		if failures++; once || failures == maxAttempts {
			return fmt.Errorf("after %d attempts: %w", failures, err)
		}
		wait := h.pause(failures)
		if isStatus {
			wait = max(wait, status.after)
		}
		h.opts.Log.Debug("hub: trying again", "attempt", failures, "wait", wait, "err", err)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w (%v)", ctx.Err(), err)
		}
	}
}
