package faults

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestLargeAnswers: a short request for an answer that nobody could hold is
// refused with the field that makes it so; one that is as large as may be is
// served, and neither disturbs those beside it.
func TestLargeAnswers(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--decode", "2")
	post := func(body string) (int, []byte) {
		resp, err := http.Post(r.URL+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return 0, nil
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Error(err)
		}
		return resp.StatusCode, b
	}
	prompts := "[" + strings.TrimSuffix(strings.Repeat(`"Once upon a time",`, 32), ",") + "]"
	huge := `{"model":"stories260k","n":128,"logprobs":20,"max_tokens":100,"ignore_eos":true,"prompt":` + prompts + `}`
	tokens := strings.TrimSuffix(strings.Repeat("403,", 400), ",")
	large := `{"model":"stories260k","n":128,"logprobs":20,"max_tokens":1,"echo":true,"prompt":[` + tokens + `]}`
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if status, b := post(huge); status != 400 || !strings.Contains(string(b), `"param":"logprobs"`) {
				t.Errorf("%d bytes ask for too much: %d %.300s", len(huge), status, b)
			}
		})
	}
	wg.Go(func() {
		status, b := post(large)
		var a struct{ Choices []json.RawMessage }
		if err := json.Unmarshal(b, &a); status != 200 || err != nil || len(a.Choices) != 128 || len(b) < 10<<20 {
			t.Errorf("a large answer: %d %v, %d bytes: %.300s", status, err, len(b), b)
		}
	})
	for i := range 14 {
		wg.Go(func() {
			if status, b := post(fmt.Sprintf(`{"model":"stories260k","prompt":"Once %d","max_tokens":16}`, i)); status != 200 {
				t.Errorf("a bystander: %d %.300s", status, b)
			}
		})
	}
	wg.Wait()
	var list struct {
		Instances []struct {
			ID      string
			State   fleet.State
			Breaker struct{ State string }
		}
	}
	if err := r.Call(http.MethodGet, "/admin/v1/instances", nil, &list); err != nil {
		t.Fatal(err)
	}
	for _, i := range list.Instances {
		if i.State != fleet.Live || i.Breaker.State != "closed" {
			t.Errorf("%+v", i)
		}
	}
}
