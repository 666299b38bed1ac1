package client_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// BenchmarkCost measures this process's time for a request with xpyd's client, net/http's and
// fasthttp's, 32 at once, against the server at XPYD_COST_URL in another process: see
// `go run ./scripts/bench loadgen -only cost`. The peers only find lines that start with
// "data:", while ours also reads the JSON.
func BenchmarkCost(b *testing.B) {
	url := os.Getenv("XPYD_COST_URL")
	if url == "" {
		b.Skip("XPYD_COST_URL is not set")
	}
	for name, stream := range map[string]bool{"whole": false, "stream16": true} {
		body := fmt.Sprintf(`{"model":"m","prompt":"%s","max_tokens":16,"stream":%v}`, strings.Repeat("word ", 400), stream)
		for client, post := range map[string]func() (poster, error){
			"xpyd":     func() (poster, error) { return newOurs(url, body, stream) },
			"net-http": func() (poster, error) { return newStd(url, body), nil },
			"fasthttp": func() (poster, error) { return newFast(url, body), nil },
		} {
			b.Run(name+"/"+client, func(b *testing.B) {
				p, err := post()
				if err != nil {
					b.Fatal(err)
				}
				perRequest(b, p, max(b.N/10, 1), 32) // warms up
				b.ReportMetric(perRequest(b, p, b.N, 32), "cpu-us/op")
			})
		}
	}
}

// poster posts once and returns the number of events.
type poster func() (events int, err error)

// perRequest is the processor time of a request in µs.
func perRequest(b *testing.B, p poster, n, at int) float64 {
	before := processor()
	var left atomic.Int64
	left.Store(int64(n))
	var clients sync.WaitGroup
	errs := make([]error, at)
	for i := range at {
		clients.Go(func() {
			for left.Add(-1) >= 0 && errs[i] == nil {
				_, errs[i] = p()
			}
		})
	}
	clients.Wait()
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	return float64((processor() - before).Microseconds()) / float64(n)
}

// processor is user and system time of this process.
func processor() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // only for bad arguments
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func newOurs(url, body string, stream bool) (poster, error) {
	c, err := client.New(client.Config{URLs: []string{url}, Path: "completions", Stream: stream, Timeout: time.Minute})
	if err != nil {
		return nil, err
	}
	results := sync.Pool{New: func() any { return new(client.Result) }}
	req := &client.Request{Body: []byte(body)}
	return func() (int, error) {
		res := results.Get().(*client.Result)
		defer results.Put(res)
		c.Do(context.Background(), req, res)
		if !res.OK() {
			return 0, fmt.Errorf("%s: %s", res.Kind, res.Message)
		}
		return res.Chunks, nil
	}, nil
}

func newStd(url, body string) poster {
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}}
	return func() (int, error) {
		resp, err := c.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		return events(resp.Body)
	}
}

func newFast(url, body string) poster {
	c := &fasthttp.HostClient{Addr: strings.TrimPrefix(url, "http://"), MaxConns: 64, StreamResponseBody: true}
	return func() (int, error) {
		req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
		defer fasthttp.ReleaseRequest(req)
		defer fasthttp.ReleaseResponse(resp)
		req.SetRequestURI(url + "/v1/completions")
		req.Header.SetMethod(fasthttp.MethodPost)
		req.Header.SetContentType("application/json")
		req.SetBodyString(body)
		if err := c.Do(req, resp); err != nil {
			return 0, err
		}
		n, err := events(resp.BodyStream())
		return n, errors.Join(err, resp.CloseBodyStream())
	}
}

var readers = sync.Pool{New: func() any { return bufio.NewReader(nil) }}

// events records when each line of data arrives.
func events(r io.Reader) (int, error) {
	br := readers.Get().(*bufio.Reader)
	defer readers.Put(br)
	br.Reset(r)
	begin := time.Now()
	gaps := make([]time.Duration, 0, 32)
	for {
		line, err := br.ReadSlice('\n')
		if bytes.HasPrefix(line, []byte("data:")) {
			gaps = append(gaps, time.Since(begin))
		}
		if err == io.EOF {
			return len(slices.Clip(gaps)), nil
		}
		if err != nil {
			return 0, err
		}
	}
}
