package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// cost measures the processor time that a request takes this process with
// xpyd's client, with net/http's and with fasthttp's, against the same server
// in another process. The peers only look for the lines that begin with
// "data:", which is less than ours does: it also reads the JSON.
func (b *loadgen) cost(ctx context.Context) error {
	url, stop, err := b.engine(ctx, "burst")
	if err != nil {
		return err
	}
	defer stop()
	for _, kind := range []struct {
		name   string
		stream bool
		n      int
	}{{"whole", false, 20000}, {"stream16", true, 10000}} {
		body := fmt.Sprintf(`{"model":"m","prompt":"%s","max_tokens":16,"stream":%v}`, strings.Repeat("word ", 400), kind.stream)
		posters := []func() (poster, error){
			func() (poster, error) { return newOurs(url, body, kind.stream) },
			func() (poster, error) { return newStd(url, body), nil },
			func() (poster, error) { return newFast(url, body), nil },
		}
		micros := make([][]float64, len(posters))
		for range b.Rounds {
			for i, make := range posters {
				p, err := make()
				if err != nil {
					return err
				}
				us, err := perRequest(p, kind.n, 32)
				if err != nil {
					return err
				}
				micros[i] = append(micros[i], us)
			}
		}
		b.Sayf("cost.%s: µs of processor time a request: ours %.2f, net/http %.2f, fasthttp %.2f", kind.name, micros[0], micros[1], micros[2])
		for i, peer := range []string{"net/http", "fasthttp"} {
			f := figures.Figure{Name: "loadgen.cpu_us." + kind.name + []string{"", "_fasthttp"}[i], Unit: "µs", Peer: peer + "'s client, without reading the JSON", Model: "2 KB prompt, 32 at once"}
			if err := b.Add(f.Ratios(micros[0], micros[i+1])); err != nil {
				return err
			}
		}
	}
	return nil
}

// poster posts once and returns the number of events.
type poster func() (events int, err error)

// perRequest is the processor time of a request in µs, with so many at once,
// after a tenth of them to warm up.
func perRequest(p poster, n, at int) (float64, error) {
	var before time.Duration
	for _, n := range []int{n / 10, n} {
		before = processor()
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
			return 0, err
		}
	}
	return float64((processor() - before).Microseconds()) / float64(n), nil
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

// events notes when each line of data came.
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
