package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// listener is a server with one connection, and all that is published about members.
func listener(t *testing.T) (c *Conn, heard func() []string, msgs chan *nats.Msg) {
	t.Helper()
	s, err := StartServer(ServerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if c, err = Connect(ConnConfig{URL: s.ClientURL(), Name: "a"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	up := make(chan struct{}, 1)
	stop := c.listen(func(l Link) {
		if l.Up {
			signal(up)
		}
	})
	<-up
	stop()
	msgs = make(chan *nats.Msg, 64)
	for _, subject := range []string{"xpyd.fleet.>", "reply"} {
		if _, err := c.nc.ChanSubscribe(subject, msgs); err != nil {
			t.Fatal(err)
		}
	}
	return c, func() (list []string) {
		t.Helper()
		if err := c.nc.Flush(); err != nil {
			t.Fatal(err)
		}
		for len(msgs) > 0 {
			m := <-msgs
			list = append(list, m.Subject+" "+string(m.Data))
		}
		return list
	}, msgs
}

// TestAnswerQuery: who is asked for, or everybody, announces itself, to the one who asks if he says
// where; what is no query is not answered.
func TestAnswerQuery(t *testing.T) {
	c, heard, _ := listener(t)
	inst := *worker("a", 7)
	a := &Announcer{cfg: AnnouncerConfig{Conn: c, Instance: inst, Load: func() Load { return Load{Running: 3} }}, log: logger(nil), inst: inst}
	inst.Load.Running = 3
	b, err := json.Marshal(inst)
	if err != nil {
		t.Fatal(err)
	}
	all, one := "xpyd.fleet.announce.a "+string(b), "reply "+string(b)
	long := `{"id":"a"}` + strings.Repeat(" ", maxMessageBytes-len(`{"id":"a"}`))
	for _, q := range []struct{ data, reply, want string }{
		{"", "", all}, {"", "reply", one}, {"{}", "", all}, {"{}", "reply", one}, {`{"id":"a"}`, "", all}, {`{"id":"a"}`, "reply", one},
		{`{"id":"b"}`, "", ""}, {`{"id":"b"}`, "reply", ""}, {"{", "", ""}, {"x", "reply", ""}, {`{"id":7}`, "reply", ""}, {long, "reply", one}, {long + " ", "reply", ""},
	} {
		a.answerQuery(&nats.Msg{Data: []byte(q.data), Reply: q.reply})
		if got := strings.Join(heard(), ", "); got != q.want {
			t.Errorf("%+q: %s", q, got)
		}
	}
	a.SetPaused(true)
	if a.answerQuery(&nats.Msg{}); len(heard()) > 0 {
		t.Error("a stopped process answers")
	}
}

// TestAnnounces: a worker announces itself and its changes at once, and says goodbye when it closes.
func TestAnnounces(t *testing.T) {
	c, heard, msgs := listener(t)
	a, err := Announce(AnnouncerConfig{Conn: c, Instance: *worker("a", 7)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	announced := func(what string, ok func(i *Instance) bool) {
		t.Helper()
		for beats := 0; beats < 8; { // it beats four times a second, and says all again in five
			select {
			case m := <-msgs:
				var i Instance
				if strings.HasPrefix(m.Subject, subjectHeartbeat) {
					beats++
				} else if err := json.Unmarshal(m.Data, &i); err == nil && m.Subject == subjectAnnounce+"a" && ok(&i) {
					return
				}
			case <-time.After(time.Minute):
				t.Fatalf("%s: nothing is heard", what)
			}
		}
		t.Errorf("%s: not announced", what)
	}
	announced("at first", func(i *Instance) bool { return i.ID == "a" && i.Epoch == 7 })
	for what, change := range map[string]func(*Instance){
		"id": func(i *Instance) { i.ID = "b" }, "epoch": func(i *Instance) { i.Epoch++ }, "both": func(i *Instance) { i.ID, i.Epoch = "b", 8 }, "invalid": func(i *Instance) { i.URL = "x" },
	} {
		if err := a.Update(change); err == nil || a.Instance().ID != "a" || a.Instance().Epoch != 7 || a.Instance().URL == "x" {
			t.Errorf("%s may change: %v", what, err)
		}
	}
	if err := a.Update(func(i *Instance) { i.Model = "m" }); err != nil || a.Instance().Model != "m" {
		t.Fatal(err)
	}
	announced("a change", func(i *Instance) bool { return i.Model == "m" })
	cancel()
	err = a.Close(ctx)
	if again := a.Close(context.Background()); !errors.Is(err, context.Canceled) || again != err {
		t.Errorf("closed: %v, then %v", err, again)
	}
	if list := heard(); len(list) == 0 || !strings.HasPrefix(list[len(list)-1], `xpyd.fleet.bye.a {"id":"a","epoch":7`) {
		t.Errorf("at the end %q", list)
	}
	goodbye := func(s string) bool { return strings.HasPrefix(s, "xpyd.fleet.bye") }
	if a, err = Announce(AnnouncerConfig{Conn: c, Instance: *worker("b", 7)}); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(context.Background()); err != nil || !slices.ContainsFunc(heard(), goodbye) {
		t.Errorf("without a deadline: %v, or it says no goodbye", err)
	}
	for _, how := range []string{"stopped", "no link"} {
		b, err := Announce(AnnouncerConfig{Conn: c, Instance: *worker("b", 7)})
		if err != nil {
			t.Fatal(err)
		}
		if b.SetPaused(how == "stopped"); how == "no link" {
			c.set(false, io.EOF)
		}
		if err := b.Close(ctx); err != nil || slices.ContainsFunc(heard(), goodbye) {
			t.Errorf("%s: %v, or it says goodbye", how, err)
		}
	}
}

// TestListeners: each is told what the link is and then its changes, until it stops.
func TestListeners(t *testing.T) {
	c := &Conn{log: logger(nil), listeners: map[int]func(Link){}}
	var told [2][]bool
	var stops [2]func()
	for i := range told {
		stops[i] = c.listen(func(l Link) { told[i] = append(told[i], l.Up) })
	}
	c.set(true, nil)
	c.set(true, nil) // it is
	stops[0]()
	c.set(false, nil)
	stops[1]()
	c.set(true, nil)
	if !slices.Equal(told[0], []bool{false, true}) || !slices.Equal(told[1], []bool{false, true, false}) {
		t.Errorf("told %v", told)
	}
}

// TestNoBacklog: while NATS is away nothing is kept for later.
func TestNoBacklog(t *testing.T) {
	c, err := Connect(ConnConfig{URL: "nats://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Publish("x", []byte("old")); !errors.Is(err, nats.ErrReconnectBufExceeded) {
		t.Errorf("published: %v", err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestPump: what one side writes the other gets, whole; the end of either ends both, and with a
// limit so does a side that does not read.
func TestPump(t *testing.T) {
	for _, limit := range []time.Duration{0, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			in, from := net.Pipe()
			to, out := net.Pipe()
			ended := make(chan struct{})
			go func() {
				pump(to, from, limit)
				close(ended)
			}()
			for _, text := range []string{"x", "hello", strings.Repeat("long", visitBuffer)} {
				go io.WriteString(in, text)
				got := make([]byte, len(text))
				if _, err := io.ReadFull(out, got); err != nil || string(got) != text {
					t.Fatalf("%d bytes of %d, %v", len(got), len(text), err)
				}
				time.Sleep(time.Hour) // neither says anything
			}
			began := time.Now()
			go io.WriteString(in, "unread")
			if limit == 0 {
				time.Sleep(time.Hour)
				in.Close()
				out.Close()
			}
			<-ended
			if d := time.Since(began); limit > 0 && d != limit {
				t.Errorf("with a limit of %v it ended after %v", limit, d)
			}
			out.SetDeadline(time.Now().Add(time.Second))
			in.SetDeadline(time.Now().Add(time.Second))
			if _, err := out.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("one end: %v", err)
			}
			if _, err := io.WriteString(in, "y"); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the other end: %v", err)
			}
		})
	}
}
