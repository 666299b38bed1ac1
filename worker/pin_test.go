package worker_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// pinning sends a request to the worker's pins and reads the answer into out.
func pinning(t *testing.T, w *worker.Worker, verb, body string, out any) int {
	t.Helper()
	resp, b := send(t, verb, w.URL()+"/xpyd/v1/cache/pin", nil, body)
	if err := json.Unmarshal(b, out); err != nil {
		t.Fatalf("%s %s: status %d: %v", verb, body, resp.StatusCode, err)
	}
	return resp.StatusCode
}

type pinAnswer struct {
	ID    string `json:"id"`
	Units int    `json:"units"`
	Pins  []struct {
		ID        string `json:"id"`
		Units     int    `json:"units"`
		HostUnits int    `json:"host_units"`
	} `json:"pins"`
	MostUnits int `json:"most_units"`
	Error     struct{ Type, Param, Code string }
}

// TestPinHTTP: pins by text and by token ids, their list, their end, and what
// is refused, in the shape of the API.
func TestPinHTTP(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.KV.HostMemory, c.KV.WritePolicy = 4<<20, "back" })
	story := stories(1)[0]
	f := func(verb, body string, status int) (a pinAnswer) {
		t.Helper()
		if got := pinning(t, w, verb, body, &a); got != status {
			t.Errorf("%s %s: status %d, want %d: %+v", verb, body, got, status, a)
		}
		return a
	}
	body := func(rest string) string { return fmt.Sprintf(`{"prompt":%q%s}`, story, rest) }
	complete(t, w, nil, body(`,"max_tokens":2`))
	pinned := f("POST", body(`,"ttl_s":600`), 200)
	soon(t, patience, func() error { // back would not have copied it by itself
		if a := f("GET", "", 200); len(a.Pins) != 1 || a.Pins[0].ID != pinned.ID || a.Pins[0].HostUnits != pinned.Units || pinned.Units < 10 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	salted := f("POST", body(`,"ttl_s":600,"cache_salt":"mine"`), 200)
	if salted.ID == pinned.ID {
		t.Error("one pin for two salts")
	}
	if keyed := f("DELETE", body(`,"cache":"alice"`), 404); keyed.Units != 0 {
		t.Errorf("%+v", keyed)
	}
	ids := f("POST", `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"ttl_s":0.5}`, 200)
	if ids.Units != 1 {
		t.Errorf("%+v", ids)
	}
	if a := f("DELETE", body(`,"cache_salt":"mine"`), 200); len(a.Pins) > 2 {
		t.Errorf("%+v", a)
	}
	f("DELETE", `{"id":"`+pinned.ID+`"}`, 200)
	soon(t, patience, func() error { // half a second is over
		if a := f("GET", "", 200); len(a.Pins) != 0 || a.Units != 0 || a.MostUnits == 0 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})

	for _, bad := range []struct {
		verb, body, param, code string
		status                  int
	}{
		{"POST", body(""), "ttl_s", "", 400},
		{"POST", body(`,"ttl_s":-1`), "ttl_s", "", 400},
		{"POST", body(`,"ttl_s":1e9`), "ttl_s", "", 400},
		{"POST", `{"ttl_s":5}`, "prompt", "", 400},
		{"POST", `{"prompt":["a","b"],"ttl_s":5}`, "prompt", "", 400},
		{"POST", `{"prompt":"short","ttl_s":5}`, "prompt", "", 400},
		{"POST", `{"prompt":[99999999],"ttl_s":5}`, "prompt", "", 400},
		{"POST", `{"prompt":"x","model":"other","ttl_s":5}`, "model", "model_not_found", 404},
		{"POST", `nonsense`, "", "", 400},
		{"DELETE", `{"id":"` + pinned.ID + `"}`, "", "not_found", 404},
		{"DELETE", body(""), "", "not_found", 404},
	} {
		if a := f(bad.verb, bad.body, bad.status); a.Error.Param != bad.param || a.Error.Code != bad.code || a.Error.Type != "invalid_request_error" {
			t.Errorf("%s %s: %+v", bad.verb, bad.body, a.Error)
		}
	}
	for i := range 20 { // until the share is used up
		var a pinAnswer
		salt := fmt.Sprintf(`,"ttl_s":600,"cache_salt":"s%d"`, i)
		if status := pinning(t, w, "POST", body(salt), &a); status == 429 && a.Error.Code == "pin_share_exceeded" && a.Error.Type == "rate_limit_error" {
			break
		} else if status != 200 || i == 19 {
			t.Fatalf("pin %d: status %d, %+v", i, status, a)
		}
	}
	empty(t, w)

	none := start(t, nil)
	var a pinAnswer
	if status := pinning(t, none, "POST", body(`,"ttl_s":5`), &a); status != 409 || a.Error.Code != "no_host_memory" {
		t.Errorf("without tiers: status %d, %+v", status, a)
	}
	if status := pinning(t, none, "GET", "", &a); status != 200 {
		t.Errorf("without tiers: status %d", status)
	}
}
