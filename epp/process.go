package main

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/pick"
)

// Names of the endpoint picker protocol, and of llm-d's sidecar.
const (
	headerDestination = "x-gateway-destination-endpoint" // decode's ip:port, for Envoy
	headerPrefiller   = "x-prefiller-host-port"          // prefill's, for the sidecar beside decode
	metadataOut       = "envoy.lb"
	metadataSubset    = "envoy.lb.subset_hint"
	keySubset         = "x-gateway-destination-endpoint-subset"
)

const (
	chunkBytes = 62 << 10 // Envoy takes streamed bodies in pieces below 64 KiB
	maxBody    = 32 << 20
	maxRest    = 1 << 20 // of a message beside a body that comes whole: longer ones are told so
	maxHeld    = 1 << 30 // bodies of all requests together
)

// server chooses a pair for each request that Envoy shows it.
type server struct {
	extproc.UnimplementedExternalProcessorServer
	pool   *pool
	picker *pick.Picker
	now    func() time.Time
	held   atomic.Int64 // bytes of bodies
}

// exchange is one request and its answer: one stream of Envoy's.
type exchange struct {
	s        *server
	stream   extproc.ExternalProcessor_ProcessServer
	streamed bool // the request's body goes back in pieces (FULL_DUPLEX_STREAMED), else not at all
	echo     bool // and the answer's
	begun    bool // its headers have come
	trailed  bool // trailers end the request, not the last piece of its body
	subset   []string
	body     []byte
	room     int64 // bytes that body has taken of what all may hold
	choice   *pick.Choice
}

// Process serves one exchange. It holds the request's body until it is whole, answers with where it
// goes, and counts the load of both workers until the answer has begun and ended.
func (s *server) Process(stream extproc.ExternalProcessor_ProcessServer) error {
	q := &exchange{s: s, stream: stream, streamed: true}
	defer q.end()
	for {
		in, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if p := in.GetProtocolConfig(); p != nil {
			q.streamed = p.GetRequestBodyMode() == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
			q.echo = p.GetResponseBodyMode() == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
		}
		more, err := q.serve(in)
		if err != nil || !more {
			return err
		}
	}
}

// serve answers one message; more is false after the last.
func (q *exchange) serve(in *extproc.ProcessingRequest) (more bool, err error) {
	switch v := in.Request.(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		if q.begun {
			return false, status.Error(codes.InvalidArgument, "a second request in one stream")
		}
		q.begun = true
		q.subset = subset(in.GetMetadataContext())
		if v.RequestHeaders.GetEndOfStream() {
			return q.route(true)
		}
		if !q.streamed { // the body comes after an answer to the headers
			return true, q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{}}})
		}
		return true, nil
	case *extproc.ProcessingRequest_RequestBody:
		if q.choice != nil {
			return false, status.Error(codes.InvalidArgument, "a body after its end")
		}
		piece := v.RequestBody.GetBody()
		switch {
		case len(q.body)+len(piece) > maxBody:
			return false, q.refuse(openai.TooLarge("the body has more than %d bytes", maxBody))
		case !q.hold(len(q.body) + len(piece)):
			return false, q.refuse(openai.Unavailable("too many requests are under way"))
		}
		q.body = append(q.body, piece...)
		if q.streamed && !v.RequestBody.GetEndOfStream() {
			return true, nil
		}
		return q.route(false)
	case *extproc.ProcessingRequest_RequestTrailers:
		if q.trailed = true; q.choice == nil && q.begun {
			if more, err := q.route(false); err != nil || !more {
				return more, err
			}
		}
		return true, q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestTrailers{RequestTrailers: &extproc.TrailersResponse{}}})
	case *extproc.ProcessingRequest_ResponseHeaders:
		q.answered(v.ResponseHeaders.GetHeaders())
		return true, q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extproc.HeadersResponse{}}})
	case *extproc.ProcessingRequest_ResponseBody:
		out := &extproc.BodyResponse{}
		if q.echo {
			out.Response = piece(v.ResponseBody.GetBody(), v.ResponseBody.GetEndOfStream())
		}
		return true, q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: out}})
	case *extproc.ProcessingRequest_ResponseTrailers:
		return true, q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}})
	}
	return false, status.Errorf(codes.Unimplemented, "message %T", in.Request)
}

// hold makes room for a body of so many bytes, in doubling steps; false: all bodies together would be too large.
func (q *exchange) hold(n int) bool {
	if n <= cap(q.body) {
		return true
	}
	room := min(max(2*n, 4<<10), maxBody)
	more := int64(room) - q.room
	if q.s.held.Add(more) > maxHeld {
		q.s.held.Add(-more)
		return false
	}
	q.room = int64(room)
	q.body = append(make([]byte, 0, room), q.body...)
	return true
}

// subset is which endpoints Envoy allows; nil: all. None that is named means none.
func subset(m *corev3.Metadata) []string {
	v := m.GetFilterMetadata()[metadataSubset].GetFields()[keySubset]
	if v == nil {
		return nil
	}
	out := []string{}
	add := func(text string) {
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				out = append(out, part)
			}
		}
	}
	add(v.GetStringValue())
	for _, e := range v.GetListValue().GetValues() {
		add(e.GetStringValue())
	}
	return out
}

// route chooses, and sends the request on its way.
func (q *exchange) route(headersOnly bool) (more bool, err error) {
	if refused := q.choose(headersOnly); refused != nil {
		return false, q.refuse(refused)
	}
	common := &extproc.CommonResponse{ClearRouteCache: true, HeaderMutation: &extproc.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{set(headerDestination, q.choice.Decode.ID)}}}
	if q.choice.Prefill != q.choice.Decode {
		common.HeaderMutation.SetHeaders = append(common.HeaderMutation.SetHeaders, set(headerPrefiller, q.choice.Prefill.ID))
	} else { // a client's own would have decode dial where the client says
		common.HeaderMutation.RemoveHeaders = []string{headerPrefiller}
	}
	out := &extproc.ProcessingResponse{DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
		metadataOut: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{headerDestination: structpb.NewStringValue(q.choice.Decode.ID)}}),
	}}}
	if !headersOnly && !q.streamed {
		out.Response = &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{Response: common}}
		return true, q.stream.Send(out)
	}
	out.Response = &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: common}}
	if err := q.stream.Send(out); err != nil || headersOnly {
		return true, err
	}
	for part := range slices.Chunk(q.body, chunkBytes) {
		q.body = q.body[len(part):]
		err := q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{Response: piece(part, len(q.body) == 0 && !q.trailed)}}})
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

func set(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, RawValue: []byte(value)}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD}
}

func piece(body []byte, end bool) *extproc.CommonResponse {
	return &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{Mutation: &extproc.BodyMutation_StreamedResponse{StreamedResponse: &extproc.StreamedBodyResponse{Body: body, EndOfStream: end}}}}
}

// choose picks the pair as the router does: by load, less what a warm prefix saves, guessed from the
// prompt's text. A request without a body, such as for the list of models, goes to any decode.
func (q *exchange) choose(headersOnly bool) *openai.Error {
	view := pick.View{Snapshot: q.s.pool.snapshot.Load(), Now: q.s.now()}
	if view.Snapshot == nil {
		return openai.Unavailable("no endpoint has been looked at yet")
	}
	req := pick.Request{Seqs: 1}
	if !headersOnly {
		top, refused := openai.Scan(q.body)
		if refused != nil {
			return refused
		}
		req = pick.Request{Model: top.Model, Tokens: top.PromptTokens(), Output: top.MaxTokens, Seqs: max(top.N, 1)}
		req.Chain = pick.NewChain(top.Prompt, top.Model, string(top.Salt), string(top.Tools))
	}
	if req.Model == "" {
		models := q.s.picker.Models(view)
		if len(models) > 1 && !headersOnly {
			return openai.BadRequest("model", "model is required: %d are served", len(models))
		}
		for name, ready := range models {
			if req.Model == "" || ready {
				req.Model = name
			}
		}
	}
	if q.subset != nil {
		for i := range view.Snapshot.Members {
			if id := view.Snapshot.Members[i].ID; !slices.Contains(q.subset, id) {
				req.Exclude = append(req.Exclude, id)
			}
		}
	}
	c, err := q.s.picker.Pick(view, &req)
	switch {
	case errors.Is(err, pick.ErrNoModel):
		return openai.ModelNotFound(req.Model)
	case err != nil:
		return openai.Unavailable("%v", err)
	}
	q.choice = c
	return nil
}

// answered ends prefill's share: decode answers once it has the prompt.
func (q *exchange) answered(headers *corev3.HeaderMap) {
	if q.choice == nil {
		return
	}
	code := ""
	for _, h := range headers.GetHeaders() {
		if h.GetKey() == ":status" {
			code = h.GetValue() + string(h.GetRawValue())
		}
	}
	if strings.HasPrefix(code, "5") {
		q.choice.Failed(fleet.Decode, pick.Broken, q.s.now())
		q.choice.EndPrefill()
		return
	}
	if strings.HasPrefix(code, "2") {
		q.choice.Succeeded(fleet.Decode)
	}
	q.choice.DonePrefill()
}

// refuse answers in place of a worker.
func (q *exchange) refuse(e *openai.Error) error {
	headers := &extproc.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{set("content-type", "application/json")}}
	if e.Status == http.StatusServiceUnavailable || e.Status == http.StatusTooManyRequests {
		headers.SetHeaders = append(headers.SetHeaders, set("retry-after", "1"))
	}
	return q.stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extproc.ImmediateResponse{
		Status: &typev3.HttpStatus{Code: typev3.StatusCode(e.Status)}, Headers: headers, Body: e.Append(nil), Details: "xpyd_epp",
	}}})
}

// end gives back what the exchange holds.
func (q *exchange) end() {
	q.s.held.Add(-q.room)
	q.body = nil
	if q.choice != nil {
		q.choice.EndPrefill()
		q.choice.EndDecode()
	}
}
