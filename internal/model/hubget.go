package model

import (
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
	size   int64  // -1 when not stated
}

// get requests u from offset on and follows redirects itself, because the
// hub states checksum and size on the first answer, because the token must
// not leave the hub's host, and because HEAD must not reach signed storage
// URLs. An answer other than 200 or 206 is a *statusError.
func (h *hub) get(ctx context.Context, method string, u *url.URL, offset int64) (*response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := time.AfterFunc(h.stall, func() { cancel(errStalled) })
	stop := func() { watch.Stop(); cancel(nil) }
	out := &response{size: -1}
	for range maxRedirects {
		req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
		if err != nil {
			stop()
			return nil, fatal{unsigned(err)}
		}
		home := u.Host == h.endpoint.Host && u.Scheme == h.endpoint.Scheme
		if home && h.token != "" {
			req.Header.Set("Authorization", "Bearer "+h.token)
		}
		req.Header.Set("User-Agent", "xpyd")
		req.Header.Set("Accept-Encoding", "identity")
		if offset > 0 {
			req.Header.Set("Range", "bytes="+strconv.FormatInt(offset, 10)+"-")
		}
		resp, err := h.http.Do(req)
		if err != nil {
			err = stalledOr(ctx, unsigned(err))
			stop()
			return nil, err
		}
		if home {
			out.note(resp.Header)
		}
		next, err := redirect(resp, u)
		if err == nil && next != nil && (method != http.MethodHead || next.Host == h.endpoint.Host) {
			resp.Body.Close()
			u = next
			continue
		}
		if err != nil {
			resp.Body.Close()
			stop()
			return nil, err
		}
		if next == nil && resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusPartialContent {
			err := h.refusal(resp, home)
			resp.Body.Close()
			stop()
			return nil, err
		}
		out.status, out.header = resp.StatusCode, resp.Header
		if next == nil && out.size < 0 && resp.StatusCode == http.StatusOK {
			out.size = resp.ContentLength
		}
		out.body = &watchedBody{ReadCloser: resp.Body, ctx: ctx, watch: watch, stall: h.stall, stop: stop}
		return out, nil
	}
	stop()
	return nil, fatal{fmt.Errorf("more than %d redirects", maxRedirects)}
}

// note keeps what the hub says of the content behind a redirect.
func (r *response) note(h http.Header) {
	if v := h.Get("X-Linked-Etag"); v != "" {
		r.etag = v
	} else if v := h.Get("Etag"); v != "" && r.etag == "" {
		r.etag = v
	}
	if n, err := strconv.ParseInt(h.Get("X-Linked-Size"), 10, 64); err == nil && n >= 0 {
		r.size = n
	}
}

// redirect returns where resp leads, nil when it is no redirect.
func redirect(resp *http.Response, from *url.URL) (*url.URL, error) {
	switch resp.StatusCode {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
	default:
		return nil, nil
	}
	to, err := from.Parse(resp.Header.Get("Location"))
	if err != nil {
		return nil, fatal{fmt.Errorf("redirect: %w", unsigned(err))}
	}
	if to.Scheme != "https" && (to.Scheme != "http" || from.Scheme == "https") {
		return nil, fatal{fmt.Errorf("redirect from %s to %s is refused", from.Scheme, to.Scheme)}
	}
	return to, nil
}

// unsigned takes the query out of the URL that err names: that of a storage link
// is as good as a token, and errors are logged.
func unsigned(err error) error {
	var e *url.Error
	if errors.As(err, &e) {
		e.URL, _, _ = strings.Cut(e.URL, "?")
	}
	return err
}

// watchedBody gives up a body that is silent for too long.
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

// statusError is an HTTP answer that is no success.
type statusError struct {
	status    int
	text      string
	retryable bool
	after     time.Duration // the server's Retry-After
}

func (e *statusError) Error() string { return e.text }

// refusal explains an answer in words for the user.
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
