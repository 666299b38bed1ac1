package profile_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/profile"
)

// device counts; its errors are settable.
type device struct {
	calls []bool
	err   error
}

func (d *device) Profile(on bool) error {
	d.calls = append(d.calls, on)
	return d.err
}

// serve returns the status and the body of one request.
func serve(p *profile.Profiler, method, query string) (int, []byte) {
	var ctx fasthttp.RequestCtx
	ctx.Request.Header.SetMethod(method)
	ctx.Request.SetRequestURI("/profile?" + query)
	if err := p.Serve(&ctx); err != nil {
		return err.Status, []byte(err.Message)
	}
	return ctx.Response.StatusCode(), ctx.Response.Body()
}

// hung is a device whose driver answers nothing until it is let go.
type hung struct {
	asked chan bool
	let   chan struct{}
}

func (h *hung) Profile(on bool) error {
	h.asked <- on
	<-h.let
	return nil
}

// TestHungDevice: a driver that hangs is waited for once and not for long; what it has
// begun when it answers after all is ended.
func TestHungDevice(t *testing.T) {
	h := &hung{make(chan bool, 8), make(chan struct{})}
	p := profile.New(h)
	defer p.Close()
	if err := p.Start(time.Minute); !errors.Is(err, profile.ErrDevice) {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.Start(time.Minute); err != nil {
			t.Fatal(err)
		}
		if s := p.State(); !s.On || s.Device {
			t.Errorf("%+v", s)
		}
		p.Stop()
	}
	if on := <-h.asked; !on || len(h.asked) > 0 {
		t.Errorf("it was told %v, and asked %d times more", on, len(h.asked))
	}
	close(h.let)
	select {
	case on := <-h.asked:
		if on {
			t.Error("it was told to begin again")
		}
	case <-time.After(time.Minute):
		t.Error("it profiles, and nobody ends that")
	}
}

func TestProfile(t *testing.T) {
	d := &device{}
	p := profile.New(d)
	defer p.Close()
	want := func(method, query string, status int) []byte {
		t.Helper()
		got, body := serve(p, method, query)
		if got != status {
			t.Fatalf("%s ?%s: %d %s, want %d", method, query, got, body, status)
		}
		return body
	}
	want("GET", "download", 404)
	for _, bad := range []string{"seconds=0", "seconds=601", "seconds=x", "seconds=-1", "seconds="} {
		want("POST", bad, 400)
	}
	want("DELETE", "", 200) // nothing to end
	for range 2 {
		var s profile.State
		if err := json.Unmarshal(want("POST", "seconds=600", 200), &s); err != nil || !s.On || !s.Device {
			t.Fatalf("%+v %v", s, err)
		}
		want("POST", "", 409)
		if err := json.Unmarshal(want("DELETE", "", 200), &s); err != nil || s.On || s.Bytes == 0 || s.Error != "" {
			t.Fatalf("%+v %v", s, err)
		}
		if _, err := gzip.NewReader(bytes.NewReader(want("GET", "download", 200))); err != nil {
			t.Errorf("not a profile: %v", err)
		}
	}
	if len(d.calls) != 4 || !d.calls[0] || d.calls[1] || !d.calls[2] || d.calls[3] {
		t.Errorf("the device was told %v", d.calls)
	}
}

// TestEndsByItself: a profile that nobody ends has an end.
func TestEndsByItself(t *testing.T) {
	p := profile.New(nil)
	defer p.Close()
	if err := p.Start(10 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(time.Minute); p.State().On; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("a minute later it still runs")
		}
	}
	if p.Last() == nil {
		t.Error("no profile")
	}
}

// TestTwoInOneProcess: Go has one CPU profiler; the second to come is told so,
// and a device that fails leaves it free.
func TestTwoInOneProcess(t *testing.T) {
	bad := &device{err: errors.New("no range")}
	a, b := profile.New(bad), profile.New(nil)
	defer a.Close()
	defer b.Close()
	if err := a.Start(time.Minute); err == nil || errors.Is(err, profile.ErrOn) {
		t.Fatalf("a device that fails: %v", err)
	}
	if err := b.Start(time.Minute); err != nil {
		t.Fatal(err)
	}
	bad.err = nil
	if err := a.Start(time.Minute); !errors.Is(err, profile.ErrOn) {
		t.Errorf("two at a time: %v", err)
	}
	b.Close()
	if err := b.Start(time.Minute); err == nil {
		t.Error("a closed one begins")
	}
	if err := a.Start(time.Minute); err != nil {
		t.Errorf("after the other's end: %v", err)
	}
}
