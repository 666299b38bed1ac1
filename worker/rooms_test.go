package worker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/worker"
)

// post sends a completion, and gives its status and body.
func post(w *worker.Worker, path, body string) chan string {
	c := make(chan string, 1)
	go func() {
		resp, err := client.Post(w.URL()+path, "application/json", strings.NewReader(body))
		if err != nil {
			c <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		c <- fmt.Sprint(resp.StatusCode, " ", string(b))
	}()
	return c
}

// meets is a request as SGLang's router sends it to both sides.
func meets(p *worker.Worker, rooms, body string) string {
	host, port, _ := strings.Cut(strings.TrimPrefix(p.URL(), "http://"), ":")
	h := `"` + host + `"`
	if strings.HasPrefix(rooms, "[") {
		n := strings.Count(rooms, ",") + 1
		h = "[" + strings.TrimSuffix(strings.Repeat(h+",", n), ",") + "]"
		port = "[" + strings.TrimSuffix(strings.Repeat(port+",", n), ",") + "]"
	}
	return fmt.Sprintf(`{%s,"bootstrap_host":%s,"bootstrap_port":%s,"bootstrap_room":%s}`, body, h, port, rooms)
}

// waiting waits until a claim or a prompt is in a room.
func waiting(t *testing.T, p *worker.Worker, kind string, rooms int) {
	t.Helper()
	soon(t, slack, func() error {
		n := 0
		for _, h := range p.Ledger().Held {
			if h.Kind == kind && strings.HasPrefix(h.ID, "room:") {
				n++
			}
		}
		if n != rooms {
			return fmt.Errorf("%d of %d rooms are %s", n, rooms, kind)
		}
		return nil
	})
}

func outcomes(t *testing.T, w *worker.Worker, outcome string) float64 {
	t.Helper()
	return counter(t, w, fmt.Sprintf("xpyd_worker_rooms_total{outcome=%q}", outcome))
}

// TestRooms: behind SGLang's router prefill computes each prompt, decode none, and the answer is that
// of a worker alone, whoever comes first.
func TestRooms(t *testing.T) {
	p, d := pair(t, func(p, _ *worker.Config) { p.Role, p.TicketWait = "prefill", patience })
	alone := start(t, nil)
	room, prompts := 0, 0
	f := func(rooms, body string, n int) {
		t.Helper()
		want := complete(t, alone, nil, "{"+body+"}")
		both := meets(p, rooms, body)
		var pc, dc chan string
		if room%2 == 0 {
			pc, dc = post(p, "/v1/completions", both), post(d, "/v1/completions", both)
		} else { // decode is early
			dc = post(d, "/v1/completions", both)
			waiting(t, p, "claimed", n)
			pc = post(p, "/v1/completions", both)
		}
		var first, got answer
		if s := <-pc; json.Unmarshal([]byte(strings.TrimPrefix(s, "200 ")), &first) != nil || len(first.Choices) != len(want.Choices) || first.Usage.Completion != len(want.Choices) {
			t.Errorf("%s: prefill %s", body, s)
		}
		s := <-dc
		if err := json.Unmarshal([]byte(strings.TrimPrefix(s, "200 ")), &got); err != nil {
			t.Fatalf("%s: decode %s", body, s)
		}
		same(t, body, &got, want)
		room++
		prompts += n
	}
	for i, body := range bodies {
		f(fmt.Sprint(int64(1)<<62+int64(i)), body, 1)
	}
	const three = `"prompt":["Once upon","Lily was","Tim had a"],"n":2,"max_tokens":8,"seed":3`
	f("[100,0,9223372036854775807]", three, 3)
	f("[200,201,202]", three, 3)
	f("300", three, 3) // the first of a row
	f("[400]", `"prompt":["Once upon"],"max_tokens":8,"seed":3`, 1)
	f("[500,501]", `"prompt":"Once upon a time","n":2,"max_tokens":8,"seed":3`, 1) // a room for each choice
	if n := outcomes(t, d, "done"); n != float64(prompts) {
		t.Errorf("%v of %d prompts were collected", n, prompts)
	}
	// Of a prompt decode computes the last position, again, for its logits.
	if n := counter(t, d, `xpyd_engine_tokens_total{phase="prefill"}`); n > float64(prompts) {
		t.Errorf("decode computed %v positions of %d prompts", n, prompts)
	}
	if n := counter(t, p, `xpyd_prefill_leases_total{by="bootstrap_room",end="taken"}`); n != float64(prompts) {
		t.Errorf("%v of %d rooms were taken", n, prompts)
	}
	empty(t, p)
	empty(t, d)
}

// TestRoomsStream: prefill answers in the form that was asked for, with one token.
func TestRoomsStream(t *testing.T) {
	p, d := pair(t, nil)
	const body = `"prompt":"Once upon a time","stream":true,"max_tokens":6,"n":2,"temperature":0,"stream_options":{"include_usage":true}`
	both := meets(p, "1", body)
	pc, dc := post(p, "/v1/completions", both), post(d, "/v1/completions", both)
	if s := <-pc; !strings.HasPrefix(s, "200 data: ") || !strings.HasSuffix(s, "data: [DONE]\n\n") || strings.Count(s, `"finish_reason":"length"`) != 2 ||
		strings.Count(s, "data: ") != 4 || !strings.Contains(s, `"completion_tokens":2`) {
		t.Errorf("prefill %s", s)
	}
	if s := <-dc; !strings.HasSuffix(s, "data: [DONE]\n\n") || !strings.Contains(s, `"completion_tokens":12`) {
		t.Errorf("decode %s", s)
	}
	empty(t, p)
	empty(t, d)

	talker := talking(t)
	p, d = pair(t, func(p, d *worker.Config) { p.Model, d.Model = talker, talker })
	both = meets(p, "2", `"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":3`)
	pc, dc = post(p, "/v1/chat/completions", both), post(d, "/v1/chat/completions", both)
	if s := <-pc; !strings.HasPrefix(s, "200 data: ") || !strings.HasSuffix(s, "data: [DONE]\n\n") || !strings.Contains(s, `"role":"assistant"`) || strings.Count(s, `"finish_reason":"`) != 1 {
		t.Errorf("prefill %s", s)
	}
	if s := <-dc; !strings.HasPrefix(s, "200 data: ") || outcomes(t, d, "done") != 1 {
		t.Errorf("decode %s", s)
	}
	empty(t, p)
	empty(t, d)
}

// TestRoomFaults: whatever becomes of a room, decode answers, with the tokens of a worker alone, and
// nothing stays.
func TestRoomFaults(t *testing.T) {
	const body = `"prompt":"Once upon a time, there was","max_tokens":8,"temperature":0`
	alone := start(t, nil)
	want := complete(t, alone, nil, "{"+body+"}")
	answers := func(d *worker.Worker, c chan string, outcome string, n float64) {
		t.Helper()
		var got answer
		s := <-c
		if err := json.Unmarshal([]byte(strings.TrimPrefix(s, "200 ")), &got); err != nil {
			t.Fatalf("%s: decode %s", outcome, s)
		}
		same(t, outcome, &got, want)
		if got := outcomes(t, d, outcome); got != n {
			t.Errorf("%v rooms ended as %s, want %v", got, outcome, n)
		}
	}
	p, d := pair(t, func(p, _ *worker.Config) { p.TicketWait = patience })

	both := meets(p, "1", body) // asked twice
	dc := post(d, "/v1/completions", both)
	waiting(t, p, "claimed", 1)
	answers(d, post(d, "/v1/completions", both), "refused", 1)
	<-post(p, "/v1/completions", both)
	answers(d, dc, "done", 1)
	answers(d, post(d, "/v1/completions", both), "late", 1)

	// Another prompt is in the room, or another tenant's.
	<-post(p, "/v1/completions", meets(p, "2", strings.Replace(body, "upon", "in", 1)))
	answers(d, post(d, "/v1/completions", meets(p, "2", body)), "refused", 2)
	<-post(p, "/v1/completions", meets(p, "3", body+`,"cache_salt":"a"`))
	answers(d, post(d, "/v1/completions", meets(p, "3", body+`,"cache_salt":"b"`)), "refused", 3)

	both = meets(p, "4", body) // decode leaves while it waits
	conn, _ := dial(t, d, "/v1/completions", both)
	waiting(t, p, "claimed", 1)
	conn.Close()
	empty(t, d)
	empty(t, p)

	both = meets(p, "5", body) // prefill ends while decode waits
	dc = post(d, "/v1/completions", both)
	waiting(t, p, "claimed", 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := p.Close(ctx); err != nil {
		t.Error(err)
	}
	var got answer
	if s := <-dc; json.Unmarshal([]byte(strings.TrimPrefix(s, "200 ")), &got) != nil {
		t.Fatalf("decode %s", s)
	}
	same(t, "prefill ended", &got, want)
	dead := outcomes(t, d, "dead")
	answers(d, post(d, "/v1/completions", both), "dead", dead+1) // and is gone
	empty(t, d)

	// No prompt comes, and no claim.
	p, d = pair(t, func(p, _ *worker.Config) { p.TicketWait, p.LeaseTime = 50*time.Millisecond, 50*time.Millisecond })
	answers(d, post(d, "/v1/completions", meets(p, "6", body)), "late", 1)
	<-post(p, "/v1/completions", meets(p, "7", body))
	empty(t, p)
	if n := counter(t, p, `xpyd_prefill_leases_total{by="bootstrap_room",end="expired"}`); n != 1 {
		t.Errorf("%v rooms expired", n)
	}
	answers(d, post(d, "/v1/completions", meets(p, "7", body)), "late", 2)
	empty(t, d)
}

// TestRoomsRefused: what does not make sense, or is not allowed, is said.
func TestRoomsRefused(t *testing.T) {
	p, d := pair(t, nil)
	host, port, _ := strings.Cut(strings.TrimPrefix(p.URL(), "http://"), ":")
	f := func(fields, param, msg string) {
		t.Helper()
		for _, w := range []*worker.Worker{p, d} {
			resp, b := ask(t, w.URL()+"/v1/completions", nil, `{"max_tokens":1,`+fields+`}`)
			if resp.StatusCode != 400 || !bytes.Contains(b, []byte(`"param":"`+param+`"`)) || !bytes.Contains(b, []byte(msg)) {
				t.Errorf("%s: %d %s", fields, resp.StatusCode, b)
			}
		}
	}
	at := fmt.Sprintf(`"bootstrap_host":%q,"bootstrap_port":%s`, host, port)
	f(`"prompt":"a",`+at, "bootstrap_room", "is missing")
	f(`"prompt":"a","bootstrap_port":1,"bootstrap_room":1`, "bootstrap_host", "0 hosts")
	f(`"prompt":"a","bootstrap_host":"","bootstrap_port":1,"bootstrap_room":1`, "bootstrap_host", "one prefill")
	f(`"prompt":"a","bootstrap_host":"h","bootstrap_port":null,"bootstrap_room":1`, "bootstrap_port", "prefill's HTTP listener")
	f(`"prompt":"a","bootstrap_host":"h","bootstrap_port":[null],"bootstrap_room":[1]`, "bootstrap_port", "one prefill")
	f(`"prompt":["a","b"],"bootstrap_host":["h","i"],"bootstrap_port":[1,1],"bootstrap_room":[1,2]`, "bootstrap_host", "one prefill")
	f(`"prompt":["a","b"],"bootstrap_host":["h","h"],"bootstrap_port":[1,2],"bootstrap_room":[1,2]`, "bootstrap_port", "one prefill")
	f(`"prompt":["a","b"],"bootstrap_host":["h","h","h"],"bootstrap_port":[1],"bootstrap_room":[1,2]`, "bootstrap_host", "3 hosts")
	f(`"prompt":["a","b"],"bootstrap_host":"h","bootstrap_port":[1,1,1],"bootstrap_room":[1,2]`, "bootstrap_port", "3 ports")
	f(`"prompt":["a","b"],`+at+`,"bootstrap_room":[1,1]`, "bootstrap_room", "room 1 is of two")
	f(`"prompt":["a","b"],`+at+`,"bootstrap_room":[1,2,3]`, "bootstrap_room", "3 rooms for 2 prompts")
	f(`"prompt":"a",`+at+`,"bootstrap_room":[1,2]`, "bootstrap_room", "2 rooms for 1 prompts")
	f(`"prompt":"a",`+at+`,"bootstrap_room":[]`, "bootstrap_room", "is missing")
	f(`"prompt":["a","b"],`+at+`,"bootstrap_room":9223372036854775807`, "bootstrap_room", "more than there are")
	f(`"prompt":"a",`+at+`,"bootstrap_room":1,"kv_transfer_params":{}`, "kv_transfer_params", "exclude")
	if resp, b := ask(t, d.URL()+"/v1/completions", nil, `{"prompt":"a","max_tokens":1,"bootstrap_host":"[::1]","bootstrap_port":1,"bootstrap_room":1}`); resp.StatusCode != 200 {
		t.Errorf("an IPv6 address in brackets: %d %s", resp.StatusCode, b)
	}
	resp, b := ask(t, d.URL()+"/v1/completions", nil, `{"prompt":"a","bootstrap_host":"192.0.2.1","bootstrap_port":1,"bootstrap_room":1}`)
	if resp.StatusCode != 400 || !bytes.Contains(b, []byte("allow_hosts")) {
		t.Errorf("a stranger: %d %s", resp.StatusCode, b)
	}
	<-post(p, "/v1/completions", meets(p, "8", `"prompt":"a"`))
	resp, b = ask(t, p.URL()+"/v1/completions", nil, meets(p, "8", `"prompt":"a"`))
	if resp.StatusCode != 400 || !bytes.Contains(b, []byte(`"param":"bootstrap_room"`)) {
		t.Errorf("a room that is taken: %d %s", resp.StatusCode, b)
	}
	<-post(d, "/v1/completions", meets(p, "8", `"prompt":"a"`))
	empty(t, p)
	empty(t, d)
}
