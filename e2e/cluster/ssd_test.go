package cluster_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// TestKilledWriting: a worker killed while writing to its SSD finds the complete units afterwards
// and gives the same tokens; by io_uring, where available, and by pread.
func TestKilledWriting(t *testing.T) {
	client := cluster.NewClient(t)
	dir := filepath.Join(t.TempDir(), "kv")
	begin := func(io string) (p *cluster.Process, url string) {
		p = cluster.Start(t, nil, "decode", "--trust-everyone", "--id", "d", "--listen", "127.0.0.1:0", "--threads", "1", "--blocks", "40", "--kv-host-memory", "4MiB",
			"--kv-ssd-dir", dir, "--kv-ssd-size", "32MiB", "--kv-ssd-io", io)
		return p, workerURL(t, p)
	}
	type answer struct {
		Choices []struct {
			TokenIDs []int `json:"token_ids"`
		}
	}
	ask := func(url string, i int) (a answer, err error) {
		body := fmt.Sprintf(`{"prompt":"%s","max_tokens":8,"seed":5,"temperature":0.8,"ignore_eos":true,"return_token_ids":true}`,
			strings.Repeat(fmt.Sprintf("She saw %d birds and %d dogs. ", i+2, i+5), 12))
		resp, err := client.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return a, err
		}
		defer resp.Body.Close()
		if err = json.NewDecoder(resp.Body).Decode(&a); err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		return a, err
	}
	const prompts = 8
	var want [prompts]answer
	fromSSD := 0.0
	for round, io := range []string{"auto", "pread", "auto", "auto"} {
		p, url := begin(io)
		for i := range prompts {
			got, err := ask(url, i)
			if err != nil {
				t.Fatalf("round %d, prompt %d: %v", round, i, err)
			}
			if round == 0 {
				want[i] = got
			} else if !reflect.DeepEqual(got, want[i]) {
				t.Errorf("round %d, prompt %d: tokens %v, want %v", round, i, got, want[i])
			}
		}
		fromSSD += metric(t, client, url, `xpyd_kvtier_loaded_units_total{tier="ssd"}`)
		if n := metric(t, client, url, `xpyd_kvtier_corrupt_units_total{tier="ssd"}`); n > 4 { // one a writer
			t.Errorf("round %d: %v corrupt units", round, n)
		}
		var others sync.WaitGroup
		for i := range 4 { // what follows is being written when the worker dies
			others.Go(func() {
				for k := 0; ; k++ {
					if _, err := ask(url, 100*(round+1)+10*k+i); err != nil {
						return // it is gone
					}
				}
			})
		}
		from := metric(t, client, url, `xpyd_kvtier_saved_units_total{tier="ssd"}`)
		for by := time.Now().Add(time.Minute); metric(t, client, url, `xpyd_kvtier_saved_units_total{tier="ssd"}`) < from+20; time.Sleep(time.Millisecond) {
			if time.Now().After(by) {
				t.Fatal("nothing is written")
			}
		}
		p.Kill()
		others.Wait()
		<-p.Done()
	}
	if fromSSD == 0 {
		t.Error("nothing came from the SSD")
	}
}

// workerURL is where a worker without a fleet listens.
func workerURL(t *testing.T, p *cluster.Process) (url string) {
	t.Helper()
	cluster.Wait(t, time.Minute, "worker is up", func() error {
		_, rest, _ := strings.Cut(p.Stderr.String(), "msg=\"worker is up\"")
		_, rest, ok := strings.Cut(rest, " url=")
		if !ok {
			return fmt.Errorf("it has not said so")
		}
		url, _, _ = strings.Cut(rest, " ")
		return nil
	})
	return url
}

// metric reads a worker's metric; 0 if there is none, or no worker.
func metric(t *testing.T, client *http.Client, url, name string) (v float64) {
	t.Helper()
	resp, err := client.Get(url + "/metrics")
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			if v, err = strconv.ParseFloat(rest, 64); err != nil {
				t.Fatal(err)
			}
		}
	}
	return v
}
