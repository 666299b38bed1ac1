package cluster_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// told is the part of an answer that a turn needs.
type told struct {
	Choices []struct {
		Text     string
		TokenIDs []int32 `json:"token_ids"`
	}
	Usage struct {
		Prompts struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func say(t *testing.T, client *http.Client, url string, talk []int32, salt string) *told {
	t.Helper()
	ids, _ := json.Marshal(talk)
	if salt != "" {
		salt = fmt.Sprintf(`,"cache_salt":%q`, salt)
	}
	body := fmt.Sprintf(`{"model":"stories260k","prompt":%s,"max_tokens":70,"ignore_eos":true,"temperature":0.7,"seed":3,"return_token_ids":true%s}`, ids, salt)
	resp, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var a told
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != 200 || len(a.Choices) != 1 {
		t.Fatalf("%d %+v %v", resp.StatusCode, a, err)
	}
	return &a
}

// TestTurns: with the defaults of `xpyd up`, prefill does not compute decode's answer of the turn
// before: usage reports it as cached, and the text is that of a cold worker. This holds with a salt
// too, because decode and prefill share memory.
func TestTurns(t *testing.T) {
	r := cluster.Up(t)
	lone := cluster.Alone(t)
	lone.Worker(t, fleet.Decode, "--id", "cold")
	var cold *cluster.Instance
	cluster.Wait(t, time.Minute, "the other worker is up", func() error {
		f, err := lone.Fleet()
		if err != nil {
			return err
		}
		if cold = f.Get("cold"); cold == nil {
			return fmt.Errorf("fleet %+v", f)
		}
		return nil
	})
	client, member := cluster.NewClient(t), lone.AsMember(t, cold)
	cached := func(talk []int32, salt string) (all bool) {
		all = true
		for i := range 4 {
			got := say(t, client, r.URL, talk, salt)
			want := say(t, member, cold.URL, talk, fmt.Sprint("cold ", talk[1], i, salt))
			if !reflect.DeepEqual(got.Choices, want.Choices) || want.Usage.Prompts.Cached != 0 {
				t.Errorf("turn %d:\n got %+v\nwant %+v", i, got, want)
			}
			// The last token of an answer has no row: the next turn computes it.
			if i > 0 && got.Usage.Prompts.Cached < (len(talk)-7)/16*16 {
				all = false
			}
			talk = append(append(talk, got.Choices[0].TokenIDs...), 310, 320, 330, 340, 350, 360)
		}
		return all
	}
	for _, salt := range []string{"", "mine"} {
		first := int32(400)
		for !cached([]int32{1, first, 407, 261, 378, 267}, salt) { // a starved machine may be too slow for kv.load_timeout
			if first++; first == 408 {
				t.Fatalf("with %q, the last turn's answer was not cached in any of 8 conversations", salt)
			}
		}
	}
	n, err := r.WorkerMetric("prefill-0", `xpyd_kvtier_loaded_units_total{tier="peer"}`)
	if err != nil || n < 12 {
		t.Errorf("prefill has fetched %v units, %v", n, err)
	}
	cluster.Wait(t, 10*time.Second, "ledgers empty", r.Idle)
}
