package kvconn_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
)

// noise is a log.
type noise struct{ bytes.Buffer }

func (n *noise) lines(msg string) int { return strings.Count(n.String(), `msg="`+msg+`"`) }

// Strangers, and peers that are refused each time, write a few lines of our logs and then
// none for a while; what was kept back is counted in the next line. What members do is
// said beside it.
func TestPeersDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := kvconntest.NewMemory(64 << 10)
		var ours, theirs noise
		log := func(n *noise) *slog.Logger { return slog.New(slog.NewTextHandler(n, nil)) }
		m, err := kvconn.NewMetrics(nil)
		if err != nil {
			t.Fatal(err)
		}
		srv, err := kvconn.NewServer(kvconntest.Config("prefill-0", 1), log(&ours), m)
		if err != nil {
			t.Fatal(err)
		}
		ln, err := tr.Listen("prefill-0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() { done <- srv.Serve(t.Context(), ln, nil) }()
		defer func() {
			ln.Close()
			<-done
		}()
		rcfg := kvconntest.Config("decode-0", 1)
		rcfg.Identity.ModelFingerprint = "another"
		r, err := kvconn.NewReceiver(rcfg, tr, log(&theirs), m)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close(t.Context())
		for range 100 {
			c, err := tr.Dial(t.Context(), "prefill-0")
			if err != nil {
				t.Fatal(err)
			}
			c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
			synctest.Wait()
			c.Close()
		}
		if n := ours.lines("kv handshake"); n != 8 {
			t.Errorf("%d lines of 100 strangers, want 8", n)
		}
		for range 100 {
			if _, err := r.Open(t.Context(), "prefill-0", kvconn.PeerID{}); err == nil {
				t.Fatal("a peer of another model")
			}
			synctest.Wait()
		}
		if n := ours.lines("kv handshake"); n != 16 {
			t.Errorf("%d lines of 100 strangers and a peer refused 100 times, want 16", n)
		}
		if n := theirs.lines("kv session not opened"); n != 8 {
			t.Errorf("%d lines of 100 refusals, want 8", n)
		}
		if strings.Contains(theirs.String(), "transport=") { // the receiver does not know which one of a Set it was
			t.Error("a line names a transport")
		}
		time.Sleep(time.Minute)
		r.Open(t.Context(), "prefill-0", kvconn.PeerID{})
		synctest.Wait()
		for _, n := range []*noise{&ours, &theirs} {
			if !strings.Contains(n.String(), "more_like_it=92") {
				t.Error("what was kept back is not counted")
			}
		}
	})
}
