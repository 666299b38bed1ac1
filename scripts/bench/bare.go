package main

import (
	"bytes"
	"io"

	"github.com/valyala/fasthttp"
)

// serveBare is the least that a two-leg proxy on fasthttp can do: the prompt goes to
// prefill, then to decode with prefill's KV coordinates appended to the body, and decode's
// reply goes to the client. It checks, counts, chooses and logs nothing.
func serveBare(addr, p, d string) error {
	prefill := &fasthttp.HostClient{Addr: p, MaxConns: 1 << 14}
	decode := &fasthttp.HostClient{Addr: d, MaxConns: 1 << 14, StreamResponseBody: true}
	s := &fasthttp.Server{NoDefaultServerHeader: true, MaxRequestBodySize: 64 << 20, Concurrency: 1 << 16,
		Handler: func(ctx *fasthttp.RequestCtx) {
			if err := twoLegs(ctx, prefill, decode); err != nil {
				ctx.Error(err.Error(), fasthttp.StatusBadGateway)
			}
		}}
	return s.ListenAndServe(addr)
}

func twoLegs(ctx *fasthttp.RequestCtx, prefill, decode *fasthttp.HostClient) error {
	body := ctx.PostBody()
	leg := func(to *fasthttp.HostClient, extra []byte, resp *fasthttp.Response) error {
		req := fasthttp.AcquireRequest()
		defer fasthttp.ReleaseRequest(req)
		req.Header.SetMethod("POST")
		req.SetRequestURI("http://engine" + string(ctx.Path()))
		req.Header.SetContentType("application/json")
		b := append(req.Body(), body[:len(body)-1]...)
		b = append(append(append(b, ','), extra...), '}')
		req.SetBodyRaw(b)
		return to.Do(req, resp)
	}
	first := fasthttp.AcquireResponse()
	defer fasthttp.ReleaseResponse(first)
	if err := leg(prefill, []byte(`"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true}`), first); err != nil {
		return err
	}
	reply := first.Body()
	at := bytes.Index(reply, []byte(`"kv_transfer_params":`))
	if at < 0 {
		return io.ErrUnexpectedEOF
	}
	second := fasthttp.AcquireResponse()
	if err := leg(decode, reply[at:len(reply)-1], second); err != nil {
		fasthttp.ReleaseResponse(second)
		return err
	}
	ctx.SetStatusCode(second.StatusCode())
	ctx.Response.Header.SetContentTypeBytes(second.Header.ContentType())
	if n := second.Header.ContentLength(); n >= 0 {
		defer fasthttp.ReleaseResponse(second)
		_, err := io.Copy(ctx.Response.BodyWriter(), second.BodyStream())
		return err
	}
	ctx.Response.ImmediateHeaderFlush = true
	ctx.SetBodyStream(second.BodyStream(), -1)
	return nil
}
