package discover

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Facts is what an engine says about itself; zero where it does not tell.
type Facts struct {
	Models      []string // the first is its own, others are adapters
	MaxModelLen int
	Version     string
	BlockTokens int
	Blocks      int
	KVEvents    string // host:port of rank 0
	KVTopic     string
	DPRanks     int
}

// NewClient makes the client for Examine: short waits, few connections.
func NewClient() *http.Client {
	return &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: 10 * time.Second,
		ResponseHeaderTimeout: 2 * time.Second, MaxResponseHeaderBytes: 64 << 10},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// errStatus is an answer other than 200.
type errStatus struct {
	path string
	code int
}

func (e errStatus) Error() string { return fmt.Sprintf("GET %s: status %d", e.path, e.code) }

// get reads an answer of at most limit bytes.
func get(ctx context.Context, c *http.Client, base, path string, limit int64) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, errStatus{path, resp.StatusCode}
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("GET %s: more than %d bytes", path, limit)
	}
	return b, err
}

// Examine asks an engine, at http://host:port, for its models (/v1/models) and, if it has them,
// version (/version), settings (SGLang's /server_info or /get_server_info) and block size
// (/metrics). Only a lack of models is an error.
func Examine(ctx context.Context, c *http.Client, base string) (*Facts, error) {
	f := &Facts{}
	b, err := get(ctx, c, base, "/v1/models", 1<<20)
	if err != nil {
		return nil, err
	}
	var models struct {
		Data []struct {
			ID  string `json:"id"`
			Max int    `json:"max_model_len"`
		} `json:"data"`
	}
	if err := json.Unmarshal(b, &models); err != nil || len(models.Data) == 0 {
		return nil, errors.New("GET /v1/models: no models in the answer")
	}
	for _, m := range models.Data {
		f.Models = append(f.Models, m.ID)
	}
	f.MaxModelLen = max(models.Data[0].Max, 0)
	f.Add(ctx, c, base)
	return f, nil
}

// Add asks for all but the models.
func (f *Facts) Add(ctx context.Context, c *http.Client, base string) {
	if b, err := get(ctx, c, base, "/version", 1<<16); err == nil {
		var v struct {
			Version string `json:"version"`
		}
		if json.Unmarshal(b, &v) == nil {
			f.Version = v.Version
		}
	}
	for _, path := range []string{"/server_info", "/get_server_info"} {
		if b, err := get(ctx, c, base, path, 4<<20); err == nil && f.serverInfo(b) {
			break
		}
	}
	if f.BlockTokens == 0 {
		if b, err := get(ctx, c, base, "/metrics", 16<<20); err == nil {
			f.metrics(b)
		}
	}
}

// serverInfo reads SGLang's settings.
func (f *Facts) serverInfo(b []byte) bool {
	var v struct {
		Version  string `json:"version"`
		PageSize int    `json:"page_size"`
		DPSize   int    `json:"dp_size"`
		KVEvents *struct {
			Host  string `json:"endpoint_host"`
			Port  int    `json:"endpoint_port_base"`
			Topic string `json:"topic"`
			Block int    `json:"block_size"`
			DP    int    `json:"dp_size"`
		} `json:"kv_events"`
	}
	if json.Unmarshal(b, &v) != nil || v.Version == "" && v.PageSize == 0 {
		return false
	}
	if f.Version == "" {
		f.Version = v.Version
	}
	f.BlockTokens, f.DPRanks = max(v.PageSize, 0), max(v.DPSize, 0)
	if e := v.KVEvents; e != nil && e.Port > 0 && e.Port < 65536 {
		f.KVEvents, f.KVTopic = net.JoinHostPort(strings.Trim(e.Host, "[]"), strconv.Itoa(e.Port)), e.Topic
		f.DPRanks = max(f.DPRanks, e.DP)
	}
	return true
}

// metrics reads vLLM's vllm:cache_config_info{block_size="16",num_gpu_blocks="…"}.
func (f *Facts) metrics(b []byte) {
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		labels, ok := strings.CutPrefix(lines.Text(), "vllm:cache_config_info{")
		if !ok {
			continue
		}
		number := func(name string) int {
			_, rest, ok := strings.Cut(labels, name+`="`)
			if !ok {
				return 0
			}
			text, _, _ := strings.Cut(rest, `"`)
			n, err := strconv.Atoi(text)
			if err != nil || n < 0 || n > 1<<30 {
				return 0
			}
			return n
		}
		f.BlockTokens, f.Blocks = number("block_size"), number("num_gpu_blocks")
		return
	}
}

// Describe fills in what an instance does not say. host replaces addresses that mean "here" to the
// engine.
func (f *Facts) Describe(i *fleet.Instance, host string) {
	set := func(to *int, v int) {
		if *to == 0 && v < 1<<30 {
			*to = v
		}
	}
	if i.Version == "" && len(f.Version) <= 128 {
		i.Version = f.Version
	}
	set(&i.MaxModelLen, f.MaxModelLen)
	set(&i.Layout.BlockTokens, f.BlockTokens)
	set(&i.Blocks, f.Blocks)
	set(&i.DPRanks, f.DPRanks)
	if at, port, err := net.SplitHostPort(f.KVEvents); err == nil && i.KVEvents == "" {
		switch at {
		case "", "*", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1":
			at = host
		}
		i.KVEvents, i.KVTopic = net.JoinHostPort(at, port), f.KVTopic
	}
}
