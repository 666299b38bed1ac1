package flight

import (
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// Models lists what can be served now.
func (s *Service) Models(ctx *fasthttp.RequestCtx, id string) {
	h1.WriteJSON(ctx, 200, openai.AppendModels(nil, s.servedTo(tenantOf(ctx))))
	s.Brief(ctx, id, "/v1/models")
}

// OneModel serves /v1/models/NAME.
func (s *Service) OneModel(ctx *fasthttp.RequestCtx, id, name string) {
	if !s.Keyed(ctx) {
		s.Refuse(ctx, id, "/v1/models", openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	list, known := s.Members.Served()
	if t := tenantOf(ctx); t != nil && !t.key.May(name) {
		list, known = nil, nil
	}
	for _, m := range list {
		if m.ID == name {
			h1.WriteJSON(ctx, 200, openai.AppendModel(nil, m))
			s.Brief(ctx, id, "/v1/models")
			return
		}
	}
	err := openai.ModelNotFound(name)
	if _, ok := known[name]; ok {
		err = openai.Unavailable("the model %q cannot be served now: no live, compatible pair of workers that have passed their probe has it", h1.Clip(name))
	}
	s.Refuse(ctx, id, "/v1/models", err)
}

// servedTo lists the models that are served and that a tenant's key may use.
func (s *Service) servedTo(t *tenant) []openai.Model {
	all, _ := s.Members.Served()
	if t == nil {
		return all
	}
	var out []openai.Model
	for _, m := range all {
		if t.key.May(m.ID) {
			out = append(out, m)
		}
	}
	return out
}
